// What all ranks must agree on inside a call: that it is the same call, and that there is room.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "core/text.hpp"
#include "host/engine.hpp"

namespace ferry::host {

void HostEngine::check_same_call(const char* stage, const CallSignature& mine) {
  for (int peer = 0; peer < size(); ++peer) {
    const std::string differs = difference(channel_.head(peer).call, peer, mine);
    if (!differs.empty()) {
      all_ranks_throw();  // whoever differs from one rank is differed from by all others
      throw Error(ErrorKind::mismatch,
                  std::string(stage) + ": rank " + std::to_string(rank()) + " and rank " +
                      std::to_string(peer) + " made different calls: " + differs,
                  {rank(), peer, stage, channel_.generation(), 0, 0});
    }
  }
}

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
  check_same_call(stage, head.call);
}

void HostEngine::agree(const char* stage, StepMessage& head, const std::function<bool()>& prepare) {
  while (true) {
    if (head.status != StepStatus::too_many) {
      head.status = prepare() ? StepStatus::ok : StepStatus::no_room;
    }
    channel_.swap(stage, head);
    check_same_call(stage, head.call);
    bool room = true;
    for (int peer = 0; peer < size(); ++peer) {
      const StepMessage theirs = channel_.head(peer);
      if (theirs.status == StepStatus::too_many) {
        all_ranks_throw();
        throw Error(ErrorKind::exhausted,
                    std::string(stage) + ": rank " + std::to_string(peer) + " would receive " +
                        std::to_string(theirs.need_bytes) + " rows but gave worst_case_rows = " +
                        std::to_string(theirs.rows) + "; nothing was sent",
                    {rank(), peer, stage, channel_.generation(), 0, 0});
      }
      room = room && theirs.status == StepStatus::ok;
    }
    if (room) return;
    // At least half of what there is, so that the number of segments stays small.
    const bool grow = head.status == StepStatus::no_room;
    const AddedSegments added =
        add_segments(stage, "rows, columns and worst_case_rows", grow ? head.need_bytes : 0,
                     memory_->arena.total_bytes() / 2);
    if (added.mine.bytes > 0) memory_->arena.add(added.mine);
  }
}

fabric::Segment HostEngine::try_register(std::size_t bytes, std::size_t wanted,
                                         std::string& reason) {
  if (wanted > bytes) {
    try {
      return memory_->fabric->register_memory(segment_bytes(wanted));
    } catch (const Error&) {  // then no more than what is needed
    }
  }
  try {
    return memory_->fabric->register_memory(segment_bytes(bytes));
  } catch (const Error& error) {
    reason = error.what();
  }
  return {};
}

AddedSegments HostEngine::add_segments(const char* stage, const char* sized_by, std::size_t bytes,
                                       std::size_t wanted) {
  StepMessage head;
  head.call.kind = CallKind::grow;
  AddedSegments added;
  std::string reason;
  if (bytes > 0) {
    added.mine = try_register(bytes, wanted, reason);
    head.status = added.mine.bytes > 0 ? StepStatus::ok : StepStatus::exhausted;
    head.segment = added.mine.id;
    head.need_bytes = added.mine.bytes > 0 ? added.mine.bytes : bytes;
    head.handle_bytes = static_cast<std::uint32_t>(added.mine.handle.size());
  }
  channel_.swap(stage, head, added.mine.handle);
  check_same_call(stage, head.call);
  int poor = -1;
  std::uint64_t missing = 0;
  for (int peer = 0; peer < size(); ++peer) {
    const StepMessage theirs = channel_.head(peer);
    added.ids.push_back(theirs.segment);
    added.bytes.push_back(theirs.handle_bytes == 0 ? 0 : theirs.need_bytes);
    if (theirs.status == StepStatus::exhausted && poor < 0) {
      poor = peer;
      missing = theirs.need_bytes;
    }
    if (peer == rank() || theirs.handle_bytes == 0) continue;
    if (theirs.handle_bytes > fabric::kMaxHandleBytes) {
      channel_.distrust(
          stage, peer,
          "sent a segment's handle of " + std::to_string(theirs.handle_bytes) + " bytes");
    }
    memory_->fabric->attach(peer, theirs.segment, theirs.need_bytes,
                            {channel_.body(peer), theirs.handle_bytes});
  }
  StepMessage attached;
  attached.call.kind = CallKind::grow;
  channel_.swap(stage, attached);
  check_same_call(stage, attached.call);
  if (added.mine.bytes > 0) memory_->fabric->seal(added.mine.id);
  if (poor < 0) return added;
  if (added.mine.bytes > 0) memory_->arena.add(added.mine);  // attached everywhere: not lost
  all_ranks_throw();
  throw Error(ErrorKind::exhausted,
              std::string(stage) + ": rank " + std::to_string(poor) + " could not register " +
                  std::to_string(missing) + " more bytes (" + sized_by + " give this size)" +
                  (poor == rank() ? ": " + reason : std::string()) + "; nothing was sent",
              {rank(), poor, stage, channel_.generation(), 0, 0});
}

}  // namespace ferry::host
