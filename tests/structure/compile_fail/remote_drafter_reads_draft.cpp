// expect: kvexact: remote_drafter cannot serve rules that read the drafts' distributions
// SPDX-License-Identifier: Apache-2.0
#include <kvexact/codec/codec.hpp>
#include <kvexact/remote/remote_drafter.hpp>
#include <kvexact/speculative/speculative_decoder.hpp>
using namespace kvexact;
struct no_channel {
  result<std::size_t> send(std::span<const std::byte>, channel_deadline) noexcept;
  result<std::size_t> receive(std::span<std::byte>, channel_deadline) noexcept;
};
struct nowhere {
  result<no_channel> operator()(channel_deadline) noexcept;
};
struct engine {
  using scalar = bf16;
  std::uint32_t vocabulary() const noexcept;
  std::uint64_t length() const noexcept;
  std::uint64_t capacity() const noexcept;
  std::uint64_t max_rollback() const noexcept;
  result<void> forward(std::span<const std::uint32_t>, std::span<float>) noexcept;
  result<void> truncate(std::uint64_t) noexcept;
  const cache_shape& shape() const noexcept;
  layer_tensors<const bf16> rows(std::uint32_t, std::uint64_t) const noexcept;
};
using near_drafter = remote_drafter<codec_without_model<bf16>, engine, nowhere>;
using decoder = speculative_decoder<engine, near_drafter, speculative_sampling>;
result<round_report> use(decoder& of) { return of.round(); }
