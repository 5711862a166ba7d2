// What all ranks do when the memory of some of them grows.
#include "engine/growth.hpp"

#include <string>

namespace ferry::engine {

std::size_t segment_bytes(std::size_t bytes) {
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  return round_up(bytes, kHugePage);
}

namespace {

fabric::Segment try_register(fabric::Fabric& fabric, const Growth& growth, std::string& reason) {
  if (growth.wanted > growth.bytes) {
    try {
      return fabric.register_memory(segment_bytes(growth.wanted));
    } catch (const Error&) {  // then no more than what is needed
    }
  }
  try {
    return fabric.register_memory(segment_bytes(growth.bytes));
  } catch (const Error& error) {
    reason = error.what();
  }
  return {};
}

/// What `peer` said in the last swap.
void attach(Channel& channel, Memory& memory, const char* stage, int peer) {
  const StepMessage theirs = channel.head(peer);
  if (theirs.handle_bytes > fabric::kMaxHandleBytes) {
    channel.throw_violation(
        stage, peer,
        "sent a segment's handle of " + std::to_string(theirs.handle_bytes) + " bytes");
  }
  try {
    memory.fabric->attach(peer, theirs.segment, theirs.need_bytes,
                          {channel.body(peer), theirs.handle_bytes});
  } catch (const Error&) {
    // Of a rank that was stopped meanwhile the others have given up, and their memory is gone.
    const auto failed =
        channel.poll(stage, [] { return Channel::kUnknownEnd; }, [](int) { return true; });
    if (failed) throw *failed;
    throw;
  }
}

}  // namespace

void check_same_call(Channel& channel, const char* stage, const CallSignature& mine) {
  for (const int peer : channel.ranks()) {
    const std::string differs = difference(channel.head(peer).call, peer, mine);
    if (!differs.empty()) {
      channel.all_ranks_throw();  // whoever differs from one rank is differed from by all others
      throw Error(ErrorKind::mismatch,
                  std::string(stage) + ": rank " + std::to_string(channel.rank()) + " and rank " +
                      std::to_string(peer) + " made different calls: " + differs,
                  {channel.rank(), peer, stage, channel.generation(), 0, 0});
    }
  }
}

AddedSegments add_segments(Channel& channel, Memory& memory, const Growth& growth) {
  const char* stage = growth.stage;
  StepMessage head;
  head.call.kind = CallKind::grow;
  AddedSegments added;
  std::string reason;
  if (growth.bytes > 0) {
    added.mine = try_register(*memory.fabric, growth, reason);
    head.status = added.mine.bytes > 0 ? StepStatus::ok : StepStatus::exhausted;
    head.segment = added.mine.id;
    head.need_bytes = added.mine.bytes > 0 ? added.mine.bytes : growth.bytes;
    head.handle_bytes = static_cast<std::uint32_t>(added.mine.handle.size());
  }
  channel.swap(stage, head, added.mine.handle);
  check_same_call(channel, stage, head.call);
  int poor = -1;
  std::uint64_t missing = 0;
  added.ids.resize(static_cast<std::size_t>(channel.size()));
  added.bytes.resize(added.ids.size());
  for (const int peer : channel.ranks()) {
    const StepMessage theirs = channel.head(peer);
    added.ids[static_cast<std::size_t>(peer)] = theirs.segment;
    added.bytes[static_cast<std::size_t>(peer)] = theirs.handle_bytes == 0 ? 0 : theirs.need_bytes;
    if (theirs.status == StepStatus::exhausted && poor < 0) {
      poor = peer;
      missing = theirs.need_bytes;
    }
    if (peer != channel.rank() && theirs.handle_bytes > 0) attach(channel, memory, stage, peer);
  }
  StepMessage attached;
  attached.call.kind = CallKind::grow;
  channel.swap(stage, attached);
  check_same_call(channel, stage, attached.call);
  if (added.mine.bytes > 0) memory.fabric->seal(added.mine.id);
  if (poor < 0) return added;
  if (added.mine.bytes > 0) memory.arena.add(added.mine);  // attached everywhere: not lost
  channel.all_ranks_throw();
  throw Error(ErrorKind::exhausted,
              std::string(stage) + ": rank " + std::to_string(poor) + " could not register " +
                  std::to_string(missing) + " more bytes (" + growth.sized_by + " give this size)" +
                  (poor == channel.rank() ? ": " + reason : std::string()) + "; nothing was sent",
              {channel.rank(), poor, stage, channel.generation(), 0, 0});
}

}  // namespace ferry::engine
