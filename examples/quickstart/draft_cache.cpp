// SPDX-License-Identifier: Apache-2.0
// A made-up cache in few bits: filled, attended to, taken back.
#include <cmath>
#include <cstdio>
#include <vector>

#include <kvexact/compression/draft_cache.hpp>
#include <kvexact/compression/kivi.hpp>
#include <kvexact/compression/uncompressed.hpp>
#include <kvexact/numeric/bf16.hpp>

using kvexact::bf16;

// The first two layers as they are, the others with keys in 4 bits and values in 2.
using draft_cache = kvexact::draft_cache<kvexact::first_layers<2, kvexact::uncompressed<bf16>>, kvexact::kivi<bf16, 4, 2>>;

int main() {
  constexpr std::uint32_t layer_count = 4, heads = 2, dim = 64;
  constexpr std::uint64_t tokens = 1000;
  std::vector<bf16> keys, values;  // of one layer, [tokens, heads, dim]
  for (std::uint64_t i = 0; i < tokens * heads * dim; ++i) {
    keys.push_back(bf16::from_float(static_cast<float>(std::sin(static_cast<double>(i) * 0.37) + std::sin(static_cast<double>(i % dim)))));
    values.push_back(bf16::from_float(static_cast<float>(std::cos(static_cast<double>(i) * 0.91))));
  }
  const auto fail = [](const kvexact::error& why) {
    std::printf("%s\n", why.message().c_str());
    return 1;
  };

  const auto shape = kvexact::cache_shape::uniform(layer_count, {.kv_heads = heads, .key_dim = dim, .value_dim = dim});
  if (!shape) return fail(shape.error());
  auto cache = draft_cache::make(*shape);
  if (!cache) return fail(cache.error());

  // Rows of a layer as they are computed, strided any way; K and V of any number of tokens.
  using rows = kvexact::strided_tensor<const bf16>;
  for (std::uint32_t layer = 0; layer < layer_count; ++layer) {
    const auto done = cache->append(layer, {rows::nhd(keys.data(), heads, dim), rows::nhd(values.data(), heads, dim)}, tokens);
    if (!done) return fail(done.error());
  }

  // The query heads of KV head 1 in layer 3, already scaled; on codes where the compressor can.
  std::vector<float> queries(3 * dim, 0.05F), out(3 * dim), log_mass(3);
  const auto attended = cache->attend(3, 1, {queries, out, log_mass});
  if (!attended) return fail(attended.error());

  // Rejected drafts are taken back: what is left was never touched by them.
  const auto truncated = cache->truncate(tokens - 5);
  if (!truncated) return fail(truncated.error());

  const std::size_t exact_bytes = layer_count * 2 * tokens * heads * dim * sizeof(bf16);
  std::printf("%zu bytes instead of %zu\n", cache->bytes(), exact_bytes);
  return cache->bytes() < exact_bytes ? 0 : 1;
}
