// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstddef>
#include <fcntl.h>
#include <memory>
#include <span>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include <common/outcome.hpp>

namespace kvexact::examples {

/// A regular file mapped for reading; a default one is empty.
class mapped_file {
 public:
  mapped_file() noexcept : mapped_file(nullptr, 0) {}

  [[nodiscard]] static outcome<mapped_file> open(const std::string& path) noexcept {
    const auto io = [&path](const char* action) {
      return failure{error_code::invalid_argument, path + ": " + action + ": " + std::generic_category().message(errno)};
    };
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) return io("cannot open");
    struct stat attributes {};
    if (::fstat(descriptor, &attributes) != 0 || !S_ISREG(attributes.st_mode)) {
      ::close(descriptor);
      return failure{error_code::invalid_argument, path + ": not a regular file"};
    }
    const auto size = static_cast<std::size_t>(attributes.st_size);
    if (size == 0) {
      ::close(descriptor);
      return mapped_file(nullptr, 0);
    }
    void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    const auto mapped = address == MAP_FAILED ? io("cannot map") : failure{};
    ::close(descriptor);
    if (address == MAP_FAILED) return mapped;
    return mapped_file(static_cast<std::byte*>(address), size);
  }

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {map_.get(), map_.get_deleter().size}; }

 private:
  struct unmap {
    std::size_t size;
    void operator()(std::byte* address) const noexcept { ::munmap(address, size); }
  };

  mapped_file(std::byte* address, std::size_t size) noexcept : map_(address, unmap{size}) {}

  std::unique_ptr<std::byte, unmap> map_;
};

}  // namespace kvexact::examples
