// Kernels of the current device that touch memory of its own and of peers.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ferry::test {

/// word[i] = value + i. What went wrong, or "".
std::string store(std::byte* to, std::uint64_t value, std::size_t words);
/// Whether word[i] == value + i * step. What went wrong, or "".
std::string expect(const std::byte* from, std::uint64_t value, std::uint64_t step,
                   std::size_t words);

/// On the stream: waits, then adds up `words` words from there into *sum (pinned; null: none).
void read_later(cudaStream_t stream, std::chrono::milliseconds wait, const void* from = nullptr,
                std::size_t words = 0, std::uint32_t* sum = nullptr);

/// On the stream: takes every SM until *end (pinned) is not 0, at most ten seconds.
void take_all_sms(cudaStream_t stream, const volatile std::uint32_t* end);

/// The architecture for which the kernels of this process were compiled, 80 for 8.0: that of the
/// PTX where the driver compiled them. -1: no kernel can be loaded.
int kernels_made_for();

}  // namespace ferry::test
