// A stream that waits for a word in pinned memory, or stores one there, with no SM held.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::cuda {

/// Work that comes behind this in the stream begins when the low 32 bits of `*word`, which the CPU
/// stores and only ever raises, has reached `value`. By a memory operation of the driver; where it
/// has none for this device, by a host function that polls. Throws Error(system).
void wait_for_word(cudaStream_t stream, const std::uint64_t* word, std::uint64_t value);

/// The low 32 bits of `*word` become `value` when all before this in the stream has ended; whoever
/// sees that with acquire sees what it stored. Throws Error(system).
void store_word(cudaStream_t stream, std::uint64_t* word, std::uint64_t value);

}  // namespace ferry::cuda
