// One shared memory object: made, checked, mapped.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fabric/memory.hpp"
#include "fabric/segment_handle.hpp"
#include "platform/unique_descriptor.hpp"

namespace ferry::fabric {

struct SharedObject {
  std::shared_ptr<Memory> memory{};
  std::uint64_t inode = 0;
  UniqueDescriptor descriptor{};
};

/// Makes the object, zeroed, with all its memory reserved, and maps it. On failure the name is gone
/// again: Error(exhausted) where /dev/shm or memory is full, with what is needed, what is free and
/// what to do; otherwise Error(system).
SharedObject create_object(const std::string& name, std::size_t bytes, int rank);

/// Maps a peer's object after checking that it is a regular file of this user, closed to others,
/// large enough, and the one in the handle. `populate`: fills in its page tables now instead of at
/// the first touch of each page. Throws Error(system) naming the peer.
std::shared_ptr<Memory> open_object(const std::string& name, const Attachment& attachment,
                                    std::uint64_t inode, bool populate = false);

/// The same for an object without a name: what a process of this user has open as `descriptor`.
std::shared_ptr<Memory> open_descriptor(std::int64_t pid, int descriptor,
                                        const Attachment& attachment, std::uint64_t inode);

}  // namespace ferry::fabric
