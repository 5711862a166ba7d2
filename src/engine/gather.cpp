#include "engine/gather.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "engine/growth.hpp"

namespace ferry::engine {

std::vector<std::vector<std::byte>> gather(Channel& channel, const char* stage,
                                           const CallSignature& call,
                                           std::span<const std::byte> mine) {
  if (mine.size() > kMostGatheredBytes) {
    throw Error(ErrorKind::invalid_argument,
                std::string(stage) + ": got " + std::to_string(mine.size()) +
                    " bytes, expected at most " + std::to_string(kMostGatheredBytes));
  }
  std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(channel.size()));
  const std::size_t most = channel.max_body_bytes();
  std::size_t longest = 1;
  for (std::size_t at = 0; at < longest; at += most) {
    StepMessage head;
    head.call = call;
    head.need_bytes = mine.size();
    const std::size_t from = std::min(at, mine.size());
    channel.swap(stage, head, mine.subspan(from, std::min(most, mine.size() - from)));
    check_same_call(channel, stage, head.call);
    for (const int peer : channel.ranks()) {
      std::vector<std::byte>& theirs = all[static_cast<std::size_t>(peer)];
      if (at == 0) {
        const std::uint64_t bytes = channel.head(peer).need_bytes;
        if (bytes > kMostGatheredBytes) {
          channel.throw_violation(stage, peer, "tells " + std::to_string(bytes) + " bytes");
        }
        theirs.resize(bytes);
        longest = std::max<std::size_t>(longest, bytes);
      }
      if (at >= theirs.size()) continue;
      std::memcpy(theirs.data() + at, channel.body(peer), std::min(most, theirs.size() - at));
    }
  }
  return all;
}

}  // namespace ferry::engine
