// SPDX-License-Identifier: Apache-2.0
// Every kernel, and what they give on a device. Exits with 77, which CTest takes for skipped, where there is none.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <vector>

#include <cuda_runtime.h>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <kvexact/cuda/attend.cuh>
#include <kvexact/cuda/cache_loader.cuh>
#include <kvexact/cuda/quantise.cuh>
#include <kvexact/speculative/cache_loader.hpp>

#include "device_checks.hpp"

using namespace kvexact;
using namespace kvexact::test;

namespace {

template <class T>
class device_array {
 public:
  explicit device_array(std::size_t size) : size_(size) { REQUIRE(cudaMalloc(&data_, size * sizeof(T)) == cudaSuccess); }
  device_array(const T* from, std::size_t size) : device_array(size) {
    REQUIRE(cudaMemcpy(data_, from, size * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  device_array(const device_array&) = delete;
  device_array& operator=(const device_array&) = delete;
  ~device_array() { cudaFree(data_); }

  /// Waits for what was queued before.
  void copy_to(T* to) const { REQUIRE(cudaMemcpy(to, data_, size_ * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess); }
  T* data() const { return data_; }
  std::span<T> span() const { return {data_, size_}; }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// Takes memory of the host, as `emulated_device` does.
struct real_device {
  template <class Q, class Number>
  static void quantise(const Q& format, const strided_tensor<const Number>& rows, std::size_t count, std::uint64_t tokens,
                       std::uint32_t heads, std::span<std::byte> packed) {
    const device_array<Number> from(rows.data, count);
    const device_array<std::byte> to(packed.size());
    const strided_tensor<const Number> there{from.data(), rows.token_stride, rows.head_stride};
    REQUIRE(cuda::quantise(format, there, tokens, heads, to.span(), nullptr));
    to.copy_to(packed.data());
  }
  template <class Q, class Number>
  static void dequantise(const Q& format, std::span<const std::byte> packed, std::uint64_t tokens, std::uint32_t heads,
                         const strided_tensor<Number>& rows, std::size_t count) {
    const device_array<std::byte> from(packed.data(), packed.size());
    const device_array<Number> to(count);
    const strided_tensor<Number> there{to.data(), rows.token_stride, rows.head_stride};
    REQUIRE(cuda::dequantise(format, from.span(), tokens, heads, there, nullptr));
    to.copy_to(rows.data);
  }
  template <class K, class V>
  static void attend(const K& keys, const V& values, const cuda::attention_call& call) {
    const device_array<std::byte> packed_keys(call.keys.data(), call.keys.size()), packed_values(call.values.data(), call.values.size());
    const device_array<float> queries(call.queries.data(), call.queries.size()), out(call.out.size()), log_mass(call.log_mass.size());
    const device_array<float> workspace(cuda::attention_workspace_floats(values, call.tokens, call.log_mass.size()));
    cuda::attention_call there = call;
    there.keys = packed_keys.span();
    there.values = packed_values.span();
    there.queries = queries.span();
    there.out = out.span();
    there.log_mass = log_mass.span();
    REQUIRE(cuda::attend(keys, values, there, workspace.span(), nullptr));
    out.copy_to(call.out.data());
    log_mass.copy_to(call.log_mass.data());
  }
};

template <int Bits>
auto turbo_quant_of(std::uint32_t dim, std::uint32_t) {
  return turbo_quant_pair<Bits>(dim);
}
template <class Format>
auto scaled_float_of(std::uint32_t dim, std::uint32_t group) {
  return scaled_float_pair<Format>(dim, group);
}
template <class K, class V>
void check_lengths(const K& keys, const V& values) {
  real_device device;
  for (const std::uint64_t tokens : {32, 96, 4096}) check_attention(device, keys.host, keys.format, values.host, values.format, tokens);
}

class pinned_bytes {
 public:
  explicit pinned_bytes(std::size_t size) : size_(size) { REQUIRE(cudaHostAlloc(&data_, size, cudaHostAllocDefault) == cudaSuccess); }
  pinned_bytes(const pinned_bytes&) = delete;
  pinned_bytes& operator=(const pinned_bytes&) = delete;
  ~pinned_bytes() { cudaFreeHost(data_); }

  std::byte* data() const { return data_; }
  std::span<std::byte> span() const { return {data_, size_}; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_;
};

/// Device memory for one full cache, the same for all requests.
struct one_slot {
  result<std::span<const cuda::cache_piece>> place(std::uint64_t) noexcept { return std::span<const cuda::cache_piece>(pieces); }
  void free(std::uint64_t) noexcept { ++freed; }

  std::vector<cuda::cache_piece> pieces;
  int freed = 0;
};
static_assert(cuda::copy_runtime<cuda::cuda_runtime> && cache_loader<cuda::cache_loader<one_slot>>);

}  // namespace

TEST_CASE("device: the bits of the host's quantisers") {
  real_device device;
  check_sizes<float>(device, scaled_float_of<fp8_e4m3>);
  check_sizes<float>(device, scaled_float_of<fp8_e5m2>);
  check_sizes<float>(device, symmetric_pair<8>);
  check_sizes<float>(device, symmetric_pair<4>);
  check_sizes<float>(device, asymmetric_pair<4>);
  check_sizes<float>(device, asymmetric_pair<3>);
  check_sizes<float>(device, asymmetric_pair<2>);
  check_sizes<float>(device, by_channel_pair<4>);
  check_sizes<float>(device, by_channel_pair<3>);
  check_sizes<float>(device, by_channel_pair<2>);
  check_sizes<float>(device, turbo_quant_of<4>);
  check_sizes<float>(device, turbo_quant_of<3>);
  check_sizes<float>(device, turbo_quant_of<2>);
  check_sizes<bf16>(device, symmetric_pair<4>);
  check_sizes<fp16>(device, by_channel_pair<2>);
  check_sizes<fp16>(device, turbo_quant_of<4>);
}

TEST_CASE("device: attention") {
  check_lengths(scaled_float_pair<fp8_e4m3>(128, 64), scaled_float_pair<fp8_e5m2>(128, 0));
  check_lengths(symmetric_pair<8>(80, 32), symmetric_pair<4>(80, 64));
  check_lengths(by_channel_pair<4>(64, 32), asymmetric_pair<4>(64, 32));
  check_lengths(by_channel_pair<3>(96, 32), asymmetric_pair<2>(96, 32));
  check_lengths(turbo_quant_pair<4>(128), turbo_quant_pair<4>(128));
  check_lengths(turbo_quant_pair<3>(80), turbo_quant_pair<2>(256));
}

TEST_CASE("device: nothing to do") {
  const auto format = symmetric_pair<4>(64, 32).format;
  CHECK(cuda::quantise(format, strided_tensor<const float>{}, 0, 2, {}, nullptr));
  CHECK(cuda::dequantise(format, {}, 0, 2, strided_tensor<float>{}, nullptr));
}

TEST_CASE("device: a cache from pinned memory and back") {
  using namespace std::chrono_literals;
  constexpr std::uint32_t layers = 8;
  constexpr std::size_t bytes = std::size_t{1} << 20;
  const pinned_bytes host(2 * layers * bytes), read(2 * layers * bytes);
  const device_array<std::byte> device(2 * layers * bytes);
  for (std::size_t i = 0; i < host.span().size(); ++i) host.data()[i] = static_cast<std::byte>(i * 2654435761U >> 16);
  one_slot slot;
  for (std::uint32_t i = 0; i < 2 * layers; ++i) slot.pieces.push_back({i / 2, host.data() + i * bytes, device.data() + i * bytes, bytes});
  auto loader = cuda::cache_loader<one_slot>::make(slot, 4 * bytes);
  REQUIRE(loader);
  cudaStream_t compute = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking) == cudaSuccess);

  REQUIRE(loader->start(1, 1));
  loader->release(1);
  CHECK(slot.freed == 1);
  REQUIRE(cudaMemset(device.data(), 0, 2 * layers * bytes) == cudaSuccess);
  REQUIRE(loader->start(1, 2));
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    const std::size_t at = 2 * layer * bytes;
    REQUIRE(loader->queue_wait(compute, 1, layer));
    REQUIRE(cudaMemcpyAsync(read.data() + at, device.data() + at, 2 * bytes, cudaMemcpyDefault, compute) == cudaSuccess);
  }
  REQUIRE(cudaStreamSynchronize(compute) == cudaSuccess);
  CHECK(std::ranges::equal(read.span(), host.span()));
  CHECK(loader->wait(1, layers - 1, 0ns));
  CHECK(*loader->left(1) == 0);

  REQUIRE(cudaMemsetAsync(device.data(), 0x5a, bytes, compute) == cudaSuccess);
  REQUIRE(loader->store(1, std::span(slot.pieces).first(1), compute));
  CHECK(loader->stored(1, 10s));
  CHECK(std::ranges::count(host.span().first(bytes), std::byte{0x5a}) == bytes);
  loader->release(1);
  REQUIRE(loader->start(1, 3));
  CHECK(loader->wait(1, layers - 1, 10s));
  device.copy_to(read.data());
  CHECK(std::ranges::equal(read.span(), host.span()));
  CHECK(cudaStreamDestroy(compute) == cudaSuccess);
}

int main(int argc, char** argv) {
  // What fails before a kernel runs needs no device.
  const auto format = symmetric_pair<4>(64, 32).format;
  std::vector<std::byte> packed(format.packed_bytes());
  const auto kernel = cuda::quantise_kernel<cuda::symmetric<4>, float>;
  const std::vector<float> row(64);
  const auto rows = strided_tensor<const float>::nhd(row.data(), 1, 64);
  const auto too_many = cuda::launch(kernel, std::numeric_limits<std::uint64_t>::max(), 8, nullptr, format, rows, 1U, 1U, packed.data());
  if (too_many || too_many.error().code != error_code::out_of_range) return 1;
  const auto no_rows = cuda::quantise(format, strided_tensor<const float>{}, 1, 1, std::span(packed), nullptr);
  if (no_rows || no_rows.error().code != error_code::invalid_argument) return 1;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    const auto refused = cuda::quantise(format, rows, 1, 1, std::span(packed), nullptr);
    if (refused || refused.error().code != error_code::device_error) return 1;
    one_slot slot;
    const auto no_loader = cuda::cache_loader<one_slot>::make(slot, 0);
    if (no_loader || no_loader.error().code != error_code::device_error) return 1;
    std::puts("skipped: no device");
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
