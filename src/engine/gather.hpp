// What ranks tell each other beside the exchanges of tokens: bytes of any length.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/call.hpp"
#include "engine/channel.hpp"

namespace ferry::engine {

/// That one rank tells in a gather.
inline constexpr std::uint64_t kMostGatheredBytes = std::uint64_t{1} << 28;

/// [R]: the bytes of each rank of the epoch, nothing of the others, in as many swaps as the longest
/// takes. Throws Error(mismatch) when ranks are in different calls.
std::vector<std::vector<std::byte>> gather(Channel& channel, const char* stage,
                                           const CallSignature& call,
                                           std::span<const std::byte> mine);

}  // namespace ferry::engine
