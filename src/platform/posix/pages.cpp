#include "platform/pages.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

namespace ferry {
namespace {

#if defined(MADV_POPULATE_WRITE)
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; older kernels refuse it
#endif

constexpr const char* kFolder = "/dev/shm";
constexpr std::size_t kLeastHuge = std::size_t{2} << 20;
constexpr std::size_t kPageBytes = 4096;
/// Of private pages, at their beginning. A huge page takes its 2 MiB with the first byte: 512 ranks
/// of one process, each of which uses little, would take a gigabyte. So memory that is hardly
/// larger has no huge page at all.
constexpr std::size_t kSmallPages = std::size_t{4} << 20;

/// Memory is reserved in pieces: a signal during the call undoes the whole piece.
constexpr std::size_t kReserveStep = std::size_t{16} << 20;

std::byte* map_shared(int fd, std::size_t bytes, int protection, SectionFailure& failure) {
  void* const at = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) {
    failure = {.call = "mmap", .error = errno};
    return nullptr;
  }
  if (bytes >= kLeastHuge) madvise(at, bytes, MADV_HUGEPAGE);  // only advice
  return static_cast<std::byte*>(at);
}

/// Gives every page its memory now. Never SIGBUS: the kernel answers instead.
int reserve(int fd, std::byte* data, std::size_t bytes) {
  // First through the mapping: the only way to huge pages. A kernel that cannot, and a file system
  // that is full, are both found by the second pass, which decides.
  for (std::size_t at = 0; at < bytes; at += kReserveStep) {
    if (madvise(data + at, std::min(kReserveStep, bytes - at), kPopulateWrite) != 0) break;
  }
  for (std::size_t at = 0; at < bytes; at += kReserveStep) {
    int error = EINTR;
    while (error == EINTR) {
      error = posix_fallocate(fd, static_cast<off_t>(at),
                              static_cast<off_t>(std::min(kReserveStep, bytes - at)));
    }
    if (error != 0) return error;
  }
  return 0;
}

/// Of this user alone.
bool is_own(const struct stat& info) {
  return S_ISREG(info.st_mode) && (info.st_mode & 077) == 0 && info.st_uid == geteuid();
}

Section mapped_section(UniqueDescriptor fd, const char* call, std::size_t bytes,
                       SectionAccess access, std::optional<std::uint64_t> inode,
                       SectionFailure& failure) {
  Section section;
  struct stat info{};
  if (!fd) {
    failure = {.call = call, .error = errno};
  } else if (fstat(fd.get(), &info) != 0) {
    failure = {.call = "fstat", .error = errno};
  } else if (!is_own(info) || (inode && *inode != info.st_ino)) {
    failure.foreign = true;
  } else if (info.st_size < 0 || static_cast<std::uint64_t>(info.st_size) < bytes) {
    failure.has = static_cast<std::uint64_t>(std::max<off_t>(info.st_size, 0));
  } else {
    section.inode = info.st_ino;
    const int protection = PROT_READ | (access == SectionAccess::write ? PROT_WRITE : 0);
    section.data = map_shared(fd.get(), bytes, protection, failure);
  }
  return section;
}

/// Sizes, maps and reserves it.
bool fill(Section& section, int fd, std::size_t bytes, SectionFailure& failure) {
  struct stat info{};
  // A umask may have taken the owner's bits.
  if (fchmod(fd, 0600) != 0) {
    failure = {.call = "fchmod", .error = errno};
  } else if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    failure = {.call = "ftruncate", .error = errno};
  } else if (section.data = map_shared(fd, bytes, PROT_READ | PROT_WRITE, failure);
             section.data != nullptr) {
    if (const int error = reserve(fd, section.data, bytes); error != 0) {
      failure = {.call = "posix_fallocate", .error = error};
    } else if (fstat(fd, &info) != 0) {
      failure = {.call = "fstat", .error = errno};
    }
  }
  section.inode = info.st_ino;
  return failure.call == nullptr;
}

}  // namespace

std::byte* private_pages(std::size_t bytes, std::size_t alignment, int& error) noexcept {
  const std::size_t mapped = bytes + alignment - kPageBytes;
  void* const at =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  error = at == MAP_FAILED ? errno : 0;
  if (error != 0) return nullptr;
  // Keep the aligned part, give back both ends.
  auto* start = static_cast<std::byte*>(at);
  const std::size_t before =
      (alignment - reinterpret_cast<std::uintptr_t>(at) % alignment) % alignment;
  const std::size_t after = mapped - before - bytes;
  if (before > 0) munmap(start, before);
  if (after > 0) munmap(start + before + bytes, after);
  start += before;
  // All of it only advice.
  const std::size_t small = bytes <= 2 * kSmallPages ? bytes : kSmallPages;
  if (bytes >= kLeastHuge) madvise(start, small, MADV_NOHUGEPAGE);
  if (bytes > small) madvise(start + small, bytes - small, MADV_HUGEPAGE);
  return start;
}

void unmap_pages(std::byte* data, std::size_t bytes) noexcept {
  munmap(data, bytes);
}

void release_pages(std::byte* data, std::size_t bytes) noexcept {
  madvise(data, bytes, MADV_REMOVE);
}

void populate_pages(std::byte* data, std::size_t bytes) noexcept {
  madvise(data, bytes, kPopulateWrite);
}

Section make_section(const std::string& name, std::size_t bytes, SectionFailure& failure) {
  Section section;
  section.descriptor =
      UniqueDescriptor(shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!section.descriptor) {
    failure = {.call = "shm_open", .error = errno};
    return section;
  }
  if (fill(section, section.descriptor.get(), bytes, failure)) return section;
  if (section.data != nullptr) unmap_pages(section.data, bytes);
  shm_unlink(name.c_str());
  return {};
}

Section open_section(const std::string& name, std::size_t bytes, SectionAccess access,
                     std::optional<std::uint64_t> inode, SectionFailure& failure) {
  // Nonblocking: a FIFO or a lease of another user must hold up nobody.
  const int flags = (access == SectionAccess::write ? O_RDWR : O_RDONLY) | O_NONBLOCK | O_CLOEXEC;
  return mapped_section(UniqueDescriptor(shm_open(name.c_str(), flags, 0)), "shm_open", bytes,
                        access, inode, failure);
}

Section open_section_of(std::int64_t pid, int descriptor, std::size_t bytes, std::uint64_t inode,
                        SectionFailure& failure) {
  const std::string name = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  return mapped_section(UniqueDescriptor(open(name.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC)),
                        "open", bytes, SectionAccess::write, inode, failure);
}

void remove_section(const std::string& name) noexcept {
  shm_unlink(name.c_str());
}

bool section_exists(const std::string& name) {
  struct stat info{};
  return lstat((kFolder + name).c_str(), &info) == 0;
}

std::optional<std::vector<std::string>> list_sections(const std::string& prefix, int& error) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kFolder), closedir);
  error = folder ? 0 : errno;
  if (!folder) return std::nullopt;
  std::vector<std::string> names;
  while (const dirent* entry = readdir(folder.get())) {
    const std::string name = entry->d_name;
    struct stat info{};
    if (!name.starts_with(prefix) ||
        fstatat(dirfd(folder.get()), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode) || info.st_uid != geteuid()) {
      continue;
    }
    names.push_back(name);
  }
  return names;
}

bool means_no_room(int error) noexcept {
  return error == ENOSPC || error == ENOMEM || error == EFBIG || error == EDQUOT;
}

std::optional<std::size_t> free_section_bytes() {
  struct statvfs info{};
  if (statvfs(kFolder, &info) != 0 || info.f_blocks == 0) return std::nullopt;
  return static_cast<std::size_t>(info.f_bavail) * info.f_frsize;
}

}  // namespace ferry
