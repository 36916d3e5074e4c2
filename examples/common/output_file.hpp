// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <common/outcome.hpp>

namespace kvexact::examples {

namespace detail {

[[nodiscard]] inline failure io_failure(error_code code, const std::string& path, const char* action, int number) {
  return {code, path + ": " + action + ": " + std::generic_category().message(number)};
}

}  // namespace detail

/// A file that appears under its name only when it is complete: bytes go to a temporary name in the same folder, `commit` renames it,
/// and the destructor removes it if `commit` was not reached. An existing file is replaced; anything else of that name
/// (a folder, a device) is refused. A file that grows beyond what the process may write is an error like any other: the signal that would
/// end the program and leave the temporary file behind is ignored from then on. The rename protects against an interrupted program, not
/// against a power cut: nothing is synced.
///
///     auto file = output_file::create("model.kvp");
///     if (!file) return file.error();
///     if (auto written = file->append(bytes); !written) return written.error();
///     return file->commit();
class output_file {
 public:
  [[nodiscard]] static outcome<output_file> create(const std::string& path) noexcept {
    try {
      struct stat existing {};
      if (::stat(path.c_str(), &existing) == 0 && !S_ISREG(existing.st_mode)) {
        return failure{error_code::output_failed, path + ": exists and is not a regular file"};
      }
      std::signal(SIGXFSZ, SIG_IGN);
      static std::atomic<unsigned> counter{0};
      for (int attempt = 0; attempt < 100; ++attempt) {
        const std::string temporary = path + '.' + std::to_string(::getpid()) + '-' + std::to_string(counter++) + ".part";
        const int descriptor = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (descriptor >= 0) return output_file(path, temporary, descriptor);
        if (errno != EEXIST) return detail::io_failure(error_code::output_failed, path, "cannot create", errno);
      }
      return failure{error_code::output_failed, path + ": cannot create: every temporary name is taken"};
    } catch (const std::exception& caught) {
      return failure{error_code::out_of_memory, caught.what()};
    }
  }

  /// Whether a file of this name could be created now: better known before the work than after it.
  [[nodiscard]] static status probe(const std::string& path) noexcept {
    const auto file = create(path);
    if (!file) return file.error();
    return done;
  }

  output_file(output_file&& other) noexcept
      : path_(std::move(other.path_)),
        temporary_(std::exchange(other.temporary_, {})),
        descriptor_(std::exchange(other.descriptor_, -1)),
        map_(std::exchange(other.map_, {})) {}
  output_file& operator=(output_file&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(temporary_, other.temporary_);
    std::swap(descriptor_, other.descriptor_);
    std::swap(map_, other.map_);
    return *this;
  }
  ~output_file() {
    close();
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  /// Writes at the end of the file.
  [[nodiscard]] status append(std::span<const std::byte> bytes) noexcept {
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0) {
        if (errno == EINTR) continue;
        return detail::io_failure(error_code::output_failed, path_, "cannot write", errno);
      }
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
    return done;
  }

  /// Gives an empty file its full size, with the disk space reserved, and maps it for writing; all bytes are zero at first.
  /// The span lives until `commit` or the end of this object. Call it at most once and not together with `append`.
  [[nodiscard]] outcome<std::span<std::byte>> map(std::uint64_t size) noexcept {
    if (size > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return failure{error_code::output_failed, path_ + ": larger than a file can be"};
    }
    if (size == 0) return std::span<std::byte>{};
    const int reserved = ::posix_fallocate(descriptor_, 0, static_cast<off_t>(size));
    if (reserved != 0) return detail::io_failure(error_code::output_failed, path_, "cannot reserve the space", reserved);
    void* const address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (address == MAP_FAILED) return detail::io_failure(error_code::output_failed, path_, "cannot map", errno);
    map_ = {static_cast<std::byte*>(address), static_cast<std::size_t>(size)};
    return map_;
  }

  /// Renames the file to its final name. Nothing can be written afterwards.
  [[nodiscard]] status commit() noexcept {
    if (!close()) return detail::io_failure(error_code::output_failed, path_, "cannot write", errno);
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
      return detail::io_failure(error_code::output_failed, path_, "cannot rename the finished file", errno);
    }
    temporary_.clear();
    return done;
  }

 private:
  output_file(std::string path, std::string temporary, int descriptor) noexcept
      : path_(std::move(path)), temporary_(std::move(temporary)), descriptor_(descriptor) {}

  bool close() noexcept {
    if (!map_.empty()) ::munmap(map_.data(), map_.size());
    map_ = {};
    const int descriptor = std::exchange(descriptor_, -1);
    return descriptor < 0 || ::close(descriptor) == 0;
  }

  std::string path_, temporary_;
  int descriptor_ = -1;
  std::span<std::byte> map_;
};

}  // namespace kvexact::examples
