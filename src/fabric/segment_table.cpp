#include "fabric/segment_table.hpp"

#include <ferry/error.hpp>
#include <string>
#include <utility>

namespace ferry::fabric {
namespace {

/// Far beyond what growth by doubling needs; keeps a wrong number from taking all memory.
constexpr SegmentId kMaxSegments = 1u << 20;

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

SegmentId SegmentTable::count(int rank) const noexcept {
  return static_cast<SegmentId>(ranks_[static_cast<std::size_t>(rank)].size());
}

void SegmentTable::add(int rank, SegmentId segment, std::shared_ptr<Memory> memory,
                       std::size_t bytes) {
  auto& segments = ranks_[static_cast<std::size_t>(rank)];
  if (segment >= kMaxSegments || find(rank, segment) != nullptr) {
    throw Error(ErrorKind::system,
                "rank " + std::to_string(self_) + ": segment " + std::to_string(segment) +
                    " of rank " + std::to_string(rank) +
                    (segment >= kMaxSegments ? " is beyond the last possible segment"
                                             : " is attached already"),
                {.rank = self_, .peer = rank});
  }
  if (segments.size() <= segment) segments.resize(std::size_t{segment} + 1);
  segments[segment] = {std::move(memory), bytes};
}

const SegmentTable::Entry* SegmentTable::find(int rank, SegmentId segment) const noexcept {
  if (rank < 0 || static_cast<std::size_t>(rank) >= ranks_.size()) return nullptr;
  const auto& segments = ranks_[static_cast<std::size_t>(rank)];
  if (segment >= segments.size() || !segments[segment].memory) return nullptr;
  return &segments[segment];
}

const SegmentTable::Entry& SegmentTable::checked(int peer, Address to, std::uint64_t bytes,
                                                 std::string_view call) const {
  check_peer(peer, static_cast<int>(ranks_.size()), self_, call);
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
  const Entry& entry = checked(peer, flag, sizeof(std::uint64_t), call);
  if (flag.offset % alignof(std::uint64_t) != 0) {
    refuse(self_, peer, call,
           "a flag word at offset " + std::to_string(flag.offset) + ", expected a multiple of 8");
  }
  return entry;
}

}  // namespace ferry::fabric
