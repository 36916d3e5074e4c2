// expect: deleted function
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>

using codec = kvexact::codec_without_model<kvexact::bf16>;

auto open(std::span<const std::byte> file, std::span<const std::byte> stream) {
  return kvexact::stream_decoder<codec>::open(*kvexact::profile<codec>::parse(file), stream);
}
