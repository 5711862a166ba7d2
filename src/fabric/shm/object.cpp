#include "fabric/shm/object.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ferry/error.hpp>
#include <optional>
#include <utility>

#include "base/open_files.hpp"
#include "base/process_limits.hpp"
#include "fabric/process.hpp"
#include "fabric/unique_descriptor.hpp"

namespace ferry::fabric {
namespace {

#if defined(MADV_POPULATE_WRITE)
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; older kernels refuse it
#endif

/// Memory is reserved in pieces: a signal during the call undoes the whole piece.
constexpr std::size_t kReserveStep = std::size_t{16} << 20;

/// Unlinks unless told that all went well.
class NameGuard {
 public:
  explicit NameGuard(const std::string& name) : name_(name) {}
  ~NameGuard() {
    if (!kept_) shm_unlink(name_.c_str());
  }
  NameGuard(const NameGuard&) = delete;
  NameGuard& operator=(const NameGuard&) = delete;
  void keep() { kept_ = true; }

 private:
  const std::string& name_;
  bool kept_ = false;
};

/// Free bytes of /dev/shm; nothing where it has no limit of its own.
std::optional<std::size_t> free_in_dev_shm() {
  struct statvfs info{};
  if (statvfs("/dev/shm", &info) != 0 || info.f_blocks == 0) return std::nullopt;
  return static_cast<std::size_t>(info.f_bavail) * info.f_frsize;
}

bool means_full(int error) {
  return error == ENOSPC || error == ENOMEM || error == EFBIG || error == EDQUOT;
}

[[noreturn]] void throw_failed(int rank, std::size_t bytes, const char* call, int error) {
  std::string message = "rank " + std::to_string(rank) + " cannot register " +
                        std::to_string(bytes) + " bytes in /dev/shm: " + call + ": " +
                        error_text(error);
  if (means_full(error)) {
    if (const auto free = free_in_dev_shm()) {
      message += "; needed " + std::to_string(bytes) + " bytes, free " + std::to_string(*free);
    }
    message +=
        "; remount /dev/shm larger (docker: --shm-size, Kubernetes: an emptyDir with medium "
        "Memory on /dev/shm) or use smaller batches";
  }
  const bool exhausted = means_full(error) || too_many_files(error);
  throw Error(exhausted ? ErrorKind::exhausted : ErrorKind::system, message, {.rank = rank});
}

[[noreturn]] void throw_limited(int rank, std::size_t bytes, const std::string& limit) {
  throw Error(ErrorKind::exhausted,
              "rank " + std::to_string(rank) + " cannot register " + std::to_string(bytes) +
                  " bytes in /dev/shm: " + limit,
              {.rank = rank});
}

/// There is room in /dev/shm, but not in this process.
[[noreturn]] void throw_unmapped(int rank, std::size_t bytes, int error) {
  const std::string limit = error == ENOMEM ? memory_limit_text(bytes) : std::string();
  throw_limited(
      rank, bytes,
      "mmap: " + error_text(error) +
          (limit.empty() ? "; use smaller batches or give this process more memory" : limit));
}

std::shared_ptr<Memory> mapped(int fd, std::size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  auto memory = std::make_shared<Memory>(static_cast<std::byte*>(at), bytes);
  if (bytes >= kHugePage) madvise(at, bytes, MADV_HUGEPAGE);  // only advice
  return memory;
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

std::shared_ptr<Memory> checked_mapping(const UniqueDescriptor& fd, const std::string& name,
                                        const Attachment& attachment, std::uint64_t inode) {
  struct stat info{};
  if (fstat(fd.get(), &info) != 0) {
    throw_attach(attachment, "fstat " + name + ": " + std::strerror(errno));
  }
  const std::size_t size = whole_pages(attachment.bytes, attachment.self);
  if (!S_ISREG(info.st_mode) || (info.st_mode & 077) != 0 || info.st_uid != geteuid() ||
      static_cast<std::uint64_t>(info.st_ino) != inode) {
    throw_attach(attachment, name + " is not the object that this rank made");
  }
  if (info.st_size < 0 || static_cast<std::uint64_t>(info.st_size) < size) {
    throw_attach(attachment, name + " has only " + std::to_string(info.st_size) + " bytes");
  }
  auto memory = mapped(fd.get(), size);
  if (!memory) {
    const int error = errno;
    throw_attach(attachment, "mmap " + name + ": " + std::strerror(error) +
                                 (error == ENOMEM ? memory_limit_text(size) : std::string()));
  }
  return memory;
}

}  // namespace

SharedObject create_object(const std::string& name, std::size_t bytes, int rank) {
  const std::size_t size = whole_pages(bytes, rank);
  if (const auto free = free_in_dev_shm(); free && size > *free) {
    throw_failed(rank, size, "no room", ENOSPC);
  }
  if (const std::string limit = file_limit_text(size); !limit.empty()) {
    throw_limited(rank, size, limit);
  }
  UniqueDescriptor fd(shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) throw_failed(rank, size, "shm_open", errno);
  NameGuard guard(name);
  // A umask may have taken the owner's bits.
  if (fchmod(fd.get(), 0600) != 0) throw_failed(rank, size, "fchmod", errno);
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    throw_failed(rank, size, "ftruncate", errno);
  }
  SharedObject object;
  object.memory = mapped(fd.get(), size);
  if (!object.memory) throw_unmapped(rank, size, errno);
  if (const int error = reserve(fd.get(), object.memory->data(), size); error != 0) {
    throw_failed(rank, size, "posix_fallocate", error);
  }
  struct stat info{};
  if (fstat(fd.get(), &info) != 0) throw_failed(rank, size, "fstat", errno);
  object.inode = static_cast<std::uint64_t>(info.st_ino);
  object.descriptor = std::move(fd);
  guard.keep();
  return object;
}

std::shared_ptr<Memory> open_object(const std::string& name, const Attachment& attachment,
                                    std::uint64_t inode, bool populate) {
  const UniqueDescriptor fd(shm_open(name.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC, 0));
  if (fd.get() < 0) {
    throw_attach(attachment, "shm_open " + name + ": " + error_text(errno) +
                                 (errno == ENOENT ? " (sealed, or the rank died or left)" : ""));
  }
  auto memory = checked_mapping(fd, name, attachment, inode);
  if (populate) madvise(memory->data(), memory->mapped(), kPopulateWrite);  // only speed
  return memory;
}

std::shared_ptr<Memory> open_descriptor(std::int64_t pid, int descriptor,
                                        const Attachment& attachment, std::uint64_t inode) {
  const std::string name = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  const UniqueDescriptor fd(open(name.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (fd.get() < 0) throw_attach(attachment, "open " + name + ": " + error_text(errno));
  return checked_mapping(fd, name, attachment, inode);
}

}  // namespace ferry::fabric
