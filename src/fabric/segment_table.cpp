#include "fabric/segment_table.hpp"

#include <ferry/error.hpp>
#include <string>
#include <utility>

#include "protocol/sync.hpp"

namespace ferry::fabric {
namespace {

[[noreturn]] void refuse(int self, int peer, std::string_view call, const std::string& reason) {
  throw Error(ErrorKind::invalid_argument,
              std::string(call) + ": rank " + std::to_string(self) + " to rank " +
                  std::to_string(peer) + ": " + reason,
              {.rank = self, .peer = peer});
}

}  // namespace

void check_peer(int peer, int ranks, int self, std::string_view call) {
  if (peer >= 0 && peer < ranks) return;
  refuse(self, peer, call, "no such rank, expected 0 to " + std::to_string(ranks - 1));
}

SegmentTable::~SegmentTable() {
  for (int rank = 0; rank < ranks_; ++rank) {
    // relaxed: nobody else uses the table any more.
    const Slots& slots = slots_[std::size_t(rank)];
    for (SegmentId id = 0; id < slots.count.load(std::memory_order_relaxed); ++id) {
      const Slot* slot = slots.at(id);
      if (slot != nullptr) delete slot->load(std::memory_order_relaxed);
    }
    delete[] slots.more.load(std::memory_order_relaxed);
  }
}

const SegmentTable::Slot* SegmentTable::Slots::at(SegmentId segment) const noexcept {
  if (segment < kFew) return &few[segment];
  const Slot* rest = more.load(std::memory_order_acquire);
  return rest == nullptr ? nullptr : rest + (segment - kFew);
}

SegmentId SegmentTable::count(int rank) const noexcept {
  if (rank < 0 || rank >= ranks_) return 0;
  // relaxed: a number by itself; `find` acquires.
  return slots_[std::size_t(rank)].count.load(std::memory_order_relaxed);
}

SegmentId SegmentTable::next() const {
  const SegmentId id = count(self_);
  if (id < kMaxSegments) return id;
  throw Error(ErrorKind::exhausted,
              "rank " + std::to_string(self_) + " has registered " + std::to_string(id) +
                  " segments, the most that a rank can have; register more memory at once "
                  "(GroupConfig::memory_bytes), or make fewer latency exchanges",
              {.rank = self_});
}

void SegmentTable::check_adopted(const Segment& segment, std::string_view fabric) const {
  if (segment.id >= next() && segment.id < kMaxSegments && segment.memory) return;
  throw Error(ErrorKind::unsupported,
              "rank " + std::to_string(self_) + ": " + std::string(fabric) +
                  " cannot share segment " + std::to_string(segment.id) +
                  "; expected mapped memory as segment " + std::to_string(next()) + " or later",
              {.rank = self_});
}

void SegmentTable::add(int rank, SegmentId segment, std::shared_ptr<Memory> memory,
                       std::size_t bytes) {
  check_peer(rank, ranks_, self_, "add");
  if (segment >= kMaxSegments || find(rank, segment) != nullptr) {
    throw Error(ErrorKind::system,
                "rank " + std::to_string(self_) + ": segment " + std::to_string(segment) +
                    " of rank " + std::to_string(rank) +
                    (segment >= kMaxSegments ? " is beyond the last possible segment"
                                             : " is attached already"),
                {.rank = self_, .peer = rank});
  }
  Slots& slots = slots_[std::size_t(rank)];
  if (segment >= Slots::kFew && slots.more.load(std::memory_order_relaxed) == nullptr) {
    // Release: who finds the places sees that they are empty.
    slots.more.store(new Slot[kMaxSegments - Slots::kFew](), std::memory_order_release);
  }
  // Release: who finds the entry sees what it holds.
  const_cast<Slot*>(slots.at(segment))
      ->store(new Entry{std::move(memory), bytes}, std::memory_order_release);
  const SegmentId end = segment + 1;
  if (count(rank) < end) slots.count.store(end, std::memory_order_relaxed);
}

void SegmentTable::clear(int rank) {
  check_peer(rank, ranks_, self_, "clear");
  Slots& slots = slots_[std::size_t(rank)];
  const SegmentId end = slots.count.exchange(0, std::memory_order_relaxed);
  for (SegmentId id = 0; id < end; ++id) {
    const Slot* slot = slots.at(id);
    if (slot == nullptr) continue;
    std::unique_ptr<const Entry> entry(
        const_cast<Slot*>(slot)->exchange(nullptr, std::memory_order_relaxed));
    if (entry) cleared_.push_back(std::move(entry));
  }
}

const SegmentTable::Entry* SegmentTable::find(int rank, SegmentId segment) const noexcept {
  if (rank < 0 || rank >= ranks_ || segment >= kMaxSegments) return nullptr;
  const Slot* slot = slots_[std::size_t(rank)].at(segment);
  return slot == nullptr ? nullptr : slot->load(std::memory_order_acquire);
}

const SegmentTable::Entry& SegmentTable::checked(int peer, Address to, std::uint64_t bytes,
                                                 std::string_view call) const {
  check_peer(peer, ranks_, self_, call);
  const Entry* entry = find(peer, to.segment);
  if (entry == nullptr) {
    refuse(self_, peer, call, "segment " + std::to_string(to.segment) + " is not attached");
  }
  // Not offset + bytes: that could overflow.
  if (to.offset > entry->bytes || bytes > entry->bytes - to.offset) {
    refuse(self_, peer, call,
           std::to_string(bytes) + " bytes at offset " + std::to_string(to.offset) +
               " leave segment " + std::to_string(to.segment) + " of " +
               std::to_string(entry->bytes) + " bytes");
  }
  return *entry;
}

const SegmentTable::Entry& SegmentTable::checked_flag(int peer, Address flag,
                                                      std::string_view call) const {
  const Entry& entry = checked(peer, flag, protocol::kFlagBytes, call);
  if (flag.offset % protocol::kFlagStride != 0) {
    refuse(self_, peer, call,
           "a flag word at offset " + std::to_string(flag.offset) + ", expected a multiple of " +
               std::to_string(protocol::kFlagStride));
  }
  return entry;
}

}  // namespace ferry::fabric
