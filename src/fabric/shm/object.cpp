#include "fabric/shm/object.hpp"

#include <cerrno>
#include <ferry/error.hpp>
#include <string_view>
#include <utility>

#include "base/open_files.hpp"
#include "base/process_limits.hpp"
#include "platform/pages.hpp"

namespace ferry::fabric {
namespace {

[[noreturn]] void throw_failed(int rank, std::size_t bytes, const char* call, int error) {
  std::string message = "rank " + std::to_string(rank) + " cannot register " +
                        std::to_string(bytes) + " bytes in /dev/shm: " + call + ": " +
                        error_text(error);
  if (means_no_room(error)) {
    if (const auto free = free_section_bytes()) {
      message += "; needed " + std::to_string(bytes) + " bytes, free " + std::to_string(*free);
    }
    message +=
        "; remount /dev/shm larger (docker: --shm-size, Kubernetes: an emptyDir with medium "
        "Memory on /dev/shm) or use smaller batches";
  }
  const bool exhausted = means_no_room(error) || too_many_files(error);
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

std::shared_ptr<Memory> owned(const Section& section, std::size_t bytes) {
  try {
    return std::make_shared<Memory>(section.data, bytes);
  } catch (...) {
    unmap_pages(section.data, bytes);
    throw;
  }
}

/// A peer's, that was opened or was not.
std::shared_ptr<Memory> attached(const Section& section, const SectionFailure& failure,
                                 const std::string& name, const Attachment& attachment) {
  const std::size_t size = whole_pages(attachment.bytes, attachment.self);
  if (section.data != nullptr) return owned(section, size);
  if (failure.foreign) throw_attach(attachment, name + " is not the object that this rank made");
  if (failure.has) {
    throw_attach(attachment, name + " has only " + std::to_string(*failure.has) + " bytes");
  }
  const int error = failure.error;
  std::string reason = std::string(failure.call) + " " + name + ": " + error_text(error);
  if (error == ENOENT) reason += " (sealed, or the rank died or left)";
  if (error == ENOMEM) reason += memory_limit_text(size);
  throw_attach(attachment, reason);
}

}  // namespace

SharedObject create_object(const std::string& name, std::size_t bytes, int rank) {
  const std::size_t size = whole_pages(bytes, rank);
  if (const auto free = free_section_bytes(); free && size > *free) {
    throw_failed(rank, size, "no room", ENOSPC);
  }
  if (const std::string limit = file_limit_text(size); !limit.empty()) {
    throw_limited(rank, size, limit);
  }
  SectionFailure failure;
  Section section = make_section(name, size, failure);
  if (failure.call != nullptr) {
    if (std::string_view(failure.call) == "mmap") throw_unmapped(rank, size, failure.error);
    throw_failed(rank, size, failure.call, failure.error);
  }
  SharedObject object;
  try {
    object.memory = owned(section, size);
  } catch (...) {
    remove_section(name);
    throw;
  }
  object.inode = section.inode;
  object.descriptor = std::move(section.descriptor);
  return object;
}

std::shared_ptr<Memory> open_object(const std::string& name, const Attachment& attachment,
                                    std::uint64_t inode, bool populate) {
  SectionFailure failure;
  const std::size_t size = whole_pages(attachment.bytes, attachment.self);
  const Section section = open_section(name, size, SectionAccess::write, inode, failure);
  auto memory = attached(section, failure, name, attachment);
  if (populate) populate_pages(memory->data(), memory->mapped());
  return memory;
}

std::shared_ptr<Memory> open_descriptor(std::int64_t pid, int descriptor,
                                        const Attachment& attachment, std::uint64_t inode) {
  SectionFailure failure;
  const std::size_t size = whole_pages(attachment.bytes, attachment.self);
  const Section section = open_section_of(pid, descriptor, size, inode, failure);
  const std::string name =
      "descriptor " + std::to_string(descriptor) + " of process " + std::to_string(pid);
  return attached(section, failure, name, attachment);
}

}  // namespace ferry::fabric
