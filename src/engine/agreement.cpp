#include "engine/agreement.hpp"

#include <algorithm>
#include <string>
#include <string_view>

#include "base/log.hpp"
#include "base/text.hpp"
#include "engine/growth.hpp"

namespace ferry::engine {

void agree_on_validity(Channel& channel, const char* stage, StepMessage head,
                       const std::optional<Error>& invalid) {
  constexpr std::size_t kMost = 300;
  const std::string mine =
      invalid ? printable(invalid->what(), std::min(kMost, channel.max_body_bytes())) : "";
  head.status = invalid ? StepStatus::invalid : StepStatus::ok;
  head.handle_bytes = static_cast<std::uint32_t>(mine.size());
  channel.swap(stage, head, std::as_bytes(std::span(mine)));
  if (invalid) {
    channel.all_ranks_throw();
    throw *invalid;
  }
  for (const int peer : channel.ranks()) {
    const StepMessage theirs = channel.head(peer);
    if (theirs.call.kind != head.call.kind || theirs.status != StepStatus::invalid) continue;
    const std::string_view words(
        reinterpret_cast<const char*>(channel.body(peer)),
        std::min({std::size_t{theirs.handle_bytes}, kMost, channel.max_body_bytes()}));
    channel.all_ranks_throw();
    throw Error(ErrorKind::mismatch,
                std::string(stage) + ": rank " + std::to_string(peer) +
                    " was given an invalid one: " + printable(words, kMost) + " (on that rank)",
                {channel.rank(), peer, stage, channel.generation(), 0, 0});
  }
  check_same_call(channel, stage, head.call);
}

void agree_on_room(Channel& channel, const char* stage, StepMessage& head,
                   const std::function<bool()>& prepare, const Room& room) {
  Arena& arena = room.memory.arena;
  while (true) {
    if (head.status != StepStatus::too_many) {
      head.status = prepare() ? StepStatus::ok : StepStatus::no_room;
    }
    channel.swap(stage, head);
    check_same_call(channel, stage, head.call);
    bool all_have = true;
    for (const int peer : channel.ranks()) {
      const StepMessage theirs = channel.head(peer);
      if (theirs.status == StepStatus::too_many) {
        channel.all_ranks_throw();
        throw Error(ErrorKind::exhausted,
                    std::string(stage) + ": rank " + std::to_string(peer) + " would receive " +
                        std::to_string(theirs.need_bytes) +
                        " rows but gave max_recv_rows (or out) = " + std::to_string(theirs.rows) +
                        "; nothing was sent",
                    {channel.rank(), peer, stage, channel.generation(), 0, 0});
      }
      all_have = all_have && theirs.status == StepStatus::ok;
    }
    if (all_have) return;
    if (room.free_held) room.free_held();
    const bool grow = head.status == StepStatus::no_room;
    const AddedSegments added = add_segments(
        channel, room.memory,
        {stage, room.sized_by, grow ? head.need_bytes : 0, grown_by(arena.total_bytes())});
    if (added.mine.bytes == 0) continue;
    arena.add(added.mine);
    channel.record().grown();
    if (logs(LogLevel::info)) {
      log(LogLevel::info, channel.rank(), "grow",
          {{"stage", stage}, {"bytes", added.mine.bytes}, {"arena_bytes", arena.total_bytes()}});
    }
  }
}

}  // namespace ferry::engine
