// SPDX-License-Identifier: Apache-2.0
#include "heap_meter.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

struct {
  bool watching = false;
  std::size_t allowed = 0;
  std::size_t live = 0;
  std::size_t peak = 0;
  std::size_t before = 0;
  bool failed = false;
} meter;

// Every block starts with its size, so that giving it back can be counted.
constexpr std::size_t front = alignof(std::max_align_t);

}  // namespace

void* operator new(std::size_t size) {
  if (meter.watching) {
    meter.failed = meter.failed || meter.allowed == 0;
    if (meter.failed) throw std::bad_alloc();
    --meter.allowed;
  }
  void* const memory = std::malloc(size + front);
  if (memory == nullptr) throw std::bad_alloc();
  *static_cast<std::size_t*>(memory) = size;
  meter.live += size;
  meter.peak = std::max(meter.peak, meter.live);
  return static_cast<std::byte*>(memory) + front;
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (...) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept {
  if (memory == nullptr) return;
  void* const block = static_cast<std::byte*>(memory) - front;
  meter.live -= *static_cast<std::size_t*>(block);
  std::free(block);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { operator delete(memory); }

// Sanitizers bring forms of their own unless all are replaced.
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new[](std::size_t size, const std::nothrow_t& nothrow) noexcept { return operator new(size, nothrow); }
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete[](void* memory, std::size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { operator delete(memory); }

namespace kvexact::test {

heap_meter::heap_meter(std::size_t allowed) {
  meter.watching = true;
  meter.allowed = allowed;
  meter.failed = false;
  meter.before = meter.live;
  meter.peak = meter.live;
}
heap_meter::~heap_meter() { meter.watching = false; }
std::size_t heap_meter::live() const { return meter.live - meter.before; }
std::size_t heap_meter::peak() const { return meter.peak - meter.before; }
bool heap_meter::failed() const { return meter.failed; }

}  // namespace kvexact::test
