// SPDX-License-Identifier: Apache-2.0
#include "allocation_meter.hpp"

#include <cstdlib>
#include <new>

namespace {

struct {
  bool watching = false;
  std::size_t allowed = 0;
  std::size_t bytes = 0;
  bool failed = false;
} meter;

}  // namespace

void* operator new(std::size_t size) {
  if (meter.watching) {
    meter.bytes += size;
    meter.failed = meter.failed || meter.allowed == 0;
    if (meter.failed) throw std::bad_alloc();
    --meter.allowed;
  }
  void* const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return operator new(size);
  } catch (...) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

// Sanitizers bring forms of their own unless all are replaced.
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new[](std::size_t size, const std::nothrow_t& nothrow) noexcept { return operator new(size, nothrow); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace kvexact::test {

allocation_meter::allocation_meter(std::size_t allowed) { meter = {true, allowed, 0, false}; }
allocation_meter::~allocation_meter() { meter.watching = false; }
std::size_t allocation_meter::bytes() const { return meter.bytes; }
bool allocation_meter::failed() const { return meter.failed; }

}  // namespace kvexact::test
