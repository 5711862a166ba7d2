// What all ranks must agree on inside a call: that it is the same call, and that there is room.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "base/text.hpp"
#include "host/throughput/engine.hpp"

namespace ferry::host {

void HostEngine::agree_on_validity(const char* stage, StepMessage head,
                                   const std::optional<Error>& invalid) {
  constexpr std::size_t kMost = 300;
  const std::string mine =
      invalid ? printable(invalid->what(), std::min(kMost, channel_.max_body_bytes())) : "";
  head.status = invalid ? StepStatus::invalid : StepStatus::ok;
  head.handle_bytes = static_cast<std::uint32_t>(mine.size());
  channel_.swap(stage, head, std::as_bytes(std::span(mine)));
  if (invalid) {
    all_ranks_throw();
    throw *invalid;
  }
  for (int peer = 0; peer < size(); ++peer) {
    const StepMessage theirs = channel_.head(peer);
    if (theirs.call.kind != head.call.kind || theirs.status != StepStatus::invalid) continue;
    const std::string_view words(reinterpret_cast<const char*>(channel_.body(peer)),
                                 std::min<std::size_t>(theirs.handle_bytes, kMost));
    all_ranks_throw();
    throw Error(ErrorKind::mismatch,
                std::string(stage) + ": rank " + std::to_string(peer) +
                    " was given an invalid one: " + printable(words, kMost) + " (on that rank)",
                {rank(), peer, stage, channel_.generation(), 0, 0});
  }
  engine::check_same_call(channel_, stage, head.call);
}

void HostEngine::agree(const char* stage, StepMessage& head, const std::function<bool()>& prepare) {
  while (true) {
    if (head.status != StepStatus::too_many) {
      head.status = prepare() ? StepStatus::ok : StepStatus::no_room;
    }
    channel_.swap(stage, head);
    engine::check_same_call(channel_, stage, head.call);
    bool room = true;
    for (int peer = 0; peer < size(); ++peer) {
      const StepMessage theirs = channel_.head(peer);
      if (theirs.status == StepStatus::too_many) {
        all_ranks_throw();
        throw Error(ErrorKind::exhausted,
                    std::string(stage) + ": rank " + std::to_string(peer) + " would receive " +
                        std::to_string(theirs.need_bytes) +
                        " rows but gave worst_case_rows (or out) = " + std::to_string(theirs.rows) +
                        "; nothing was sent",
                    {rank(), peer, stage, channel_.generation(), 0, 0});
      }
      room = room && theirs.status == StepStatus::ok;
    }
    if (room) return;
    const bool grow = head.status == StepStatus::no_room;
    const AddedSegments added =
        add_segments({stage, "rows, columns and worst_case_rows", grow ? head.need_bytes : 0,
                      engine::grown_by(memory_->arena.total_bytes())});
    if (added.mine.bytes > 0) memory_->arena.add(added.mine);
  }
}

}  // namespace ferry::host
