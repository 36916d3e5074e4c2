# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF of the Llama architecture to model.safetensors (bf16) and tokenizer.json.

usage: convert.py MODEL.gguf FOLDER

Tensors keep their GGUF names, and the rows of attn_q and attn_k keep the GGUF's order, in which the two numbers that a rotary
frequency turns are neighbours. The hyperparameters become metadata of the safetensors file.
"""
import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, TokenType, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bits of bf16, to nearest, ties to even (weights are finite)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    header, offset = {"__metadata__": metadata}, 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in tensors.values():
            file.write(bits.tobytes())


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # what GGUF calls "smollm"
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    reader = GGUFReader(source)
    field = lambda name: reader.fields[name].contents()
    if field("general.architecture") != "llama" or field("tokenizer.ggml.pre") != "smollm":
        sys.exit(f"{source}: not a llama model with the smollm pre-tokenizer")
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = to_bf16(values).reshape([int(n) for n in reversed(tensor.shape)])
    metadata = {
        "layers": field("llama.block_count"),
        "heads": field("llama.attention.head_count"),
        "kv_heads": field("llama.attention.head_count_kv"),
        "rope_base": field("llama.rope.freq_base"),
        "norm_epsilon": field("llama.attention.layer_norm_rms_epsilon"),
        "source": source.name,
    }
    metadata = {key: f"{value:.7g}" if isinstance(value, float) else str(value) for key, value in metadata.items()}
    write_safetensors(folder / "model.safetensors", tensors, metadata)
    build_tokenizer(reader).save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
