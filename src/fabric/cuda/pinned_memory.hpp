// Pinned host memory of this process. The driver frees such memory only when no kernel of the
// process runs, on any GPU; one that waits for the very thread that frees would never end. So it is
// kept for the next who asks for as much.
#pragma once
#include <cstddef>
#include <memory>

namespace ferry::fabric {

/// At least `bytes` that every GPU of the process reaches at the same address; any values. A
/// primary context must be current. Goes back with its last owner: by then nothing on a GPU may use
/// it. Thread-safe. Throws CallRefused.
std::shared_ptr<std::byte> pinned_memory(std::size_t bytes);

}  // namespace ferry::fabric
