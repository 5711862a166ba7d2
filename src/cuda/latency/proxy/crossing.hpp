// What a latency exchange on GPUs sends to other domains and gets from there. Kernels know nothing
// of it: towards a rank beyond the domain they write into an outbox, in pinned memory, just what
// they would write into that rank's memory, and look for its answers in an inbox. A proxy plays the
// kernels of the rank on the other side: it waits for the words and tags in the outbox as they
// would, puts what has come into the peer's inbox through the network, and when the peer's flag
// says that everything of its own has landed here, writes the words and tags that this rank's
// kernels wait for. So no kernel waits for the network in any other way than for a peer, nothing
// depends on the order of puts, and all deadlines and masks are the kernels' own.
//
// Three things cross in a generation: dispatched rows, one put for each (token, rank) with all that
// belongs to it; weights that a combine pushes, one put for each rank; and rows of sums, one put
// each. Each ends with a flag that counts its bytes. Nothing is put where something earlier may
// still be landing: a dispatch waits for the credit of the receiver, which the receiver's proxy
// sends no sooner than what it speaks of has landed; weights and sums for an acknowledgement.
//
// Rejoining is the kernels' own, too: their offers and answers cross like credits. When this rank's
// kernel has rejoined, its proxy leaves out what was before, on both sides, and tells each peer so
// in every line in which it tells of what it puts. It takes nothing from a peer, sends it nothing
// and gives it no credit until the peer has said the same: then all that came before has landed.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kernels/latency/view.hpp"
#include "cuda/latency/memory.hpp"
#include "engine/reach.hpp"
#include "protocol/sync.hpp"

namespace ferry::cuda {

using protocol::Generation;

/// In a flag: the rank has rejoined and sends nothing that is older.
inline constexpr std::uint32_t kRejoined = (1u << kCrossingShift) - 2;
/// Of a word of rejoining.
inline constexpr std::uint64_t round_of(std::uint64_t word) {
  return word >> kRejoinShift;
}
inline constexpr Generation generation_in(std::uint64_t word) {
  return word & ((std::uint64_t{1} << kRejoinShift) - 1);
}

/// What one rank's side of the crossing works on.
struct CrossingParts {
  LatencyView view{};         ///< of the exchange; `peers` and `sources` beyond are not looked at
  std::vector<int> beyond{};  ///< the ranks of other domains
  CrossingMemory layout{};    ///< the same on all ranks
  std::byte* data = nullptr;  ///< this rank's
  std::shared_ptr<void> memory{};  ///< keeps it
  engine::FabricReach reach;       ///< of that memory, with tags that nobody else uses
  /// Whether a rank will never come again; null: nobody can tell.
  std::function<bool(int)> is_gone{};
  /// The peer sent what cannot be: fails the group and throws.
  std::function<void(int peer, const std::string& what)> violation{};
};

/// Not thread-safe: one thread polls.
class LatencyCrossing {
 public:
  explicit LatencyCrossing(CrossingParts parts);

  /// Does what there is to do, without waiting. False: there was nothing.
  bool poll();
  /// Now and then: tells the kernels of ranks that are gone.
  void look_after_peers();

 private:
  /// A token with slots at a rank: those of this rank's tokens that go to a peer, or of a peer's
  /// that come here.
  struct Entry {
    std::uint32_t token = 0;
    std::uint32_t slots = 0;  ///< a bit for each
  };
  struct Listing {
    Generation generation = 0;
    std::vector<Entry> entries{};
  };
  /// One way of one kind of rows, in one of the two buffers.
  struct Way {
    Generation flagged = 0;        ///< the last that was told of, or taken
    Generation begun = 0;          ///< whose rows are being put
    std::uint32_t kind = 0;        ///< of sums: the bits of their tags above the generation
    std::uint64_t bytes = 0;       ///< put so far
    std::vector<Entry> pending{};  ///< not put so far
  };
  struct Peer {
    int rank = 0;
    Generation sent = 0;                                ///< dispatches that were handed over
    Generation came = 0;                                ///< dispatches that came
    Way dispatch{};                                     ///< of sent + 1
    std::uint32_t tokens = 0, format = 0, refused = 0;  ///< of it
    std::array<Listing, 2> out{}, in{};                 ///< by parity
    std::array<Way, 2> weights_out{}, weights_in{}, sums_out{}, sums_in{};
    std::uint64_t released = 0;  ///< told
    std::uint64_t gone_word = 0, gone_seen = 0;
    std::uint64_t offered = 0, answered = 0;  ///< told: words of the kernels' rejoining
    bool settled = true;  ///< what it sent before the last rejoin has landed, and it was told so
    bool dead = false;
  };

  // crossing.cpp
  bool forward_credit(Peer& peer);
  bool forward_mask(Peer& peer);
  bool take_mask(Peer& peer);
  bool forward_rejoin(Peer& peer);
  bool forward_rejoin(Peer& peer, std::size_t lines, protocol::Channel channel,
                      std::uint64_t& told);
  bool follow_rejoin();
  void leave_behind(Peer& peer);
  bool settle(Peer& peer);
  // crossing_rows.cpp
  bool send_dispatch(Peer& peer);
  bool begin_dispatch(Peer& peer);
  bool list_own(Peer& peer, const LatencyPlaces& at);
  bool has_row(const LatencyPlaces& at, const Peer& peer, std::uint32_t token) const;
  void put_record(Peer& peer, const LatencyPlaces& at, const Entry* entry);
  bool take_dispatch(Peer& peer);
  const LatencyRecord* record_at(const LatencyPlaces& at, const Peer& peer,
                                 std::int64_t token) const;
  const LatencyRecord* find_record(const LatencyPlaces& at, const Peer& peer) const;
  void fill_header(const Peer& peer, const LatencyPlaces& at, const LatencyRecord& first,
                   std::uint32_t format) const;
  // crossing_sums.cpp
  bool send_weights(Peer& peer, std::size_t parity);
  bool find_weights(const Peer& peer, std::size_t parity, std::vector<float>& weights) const;
  bool take_weights(Peer& peer, std::size_t parity);
  bool send_sums(Peer& peer, std::size_t parity);
  bool begin_sums(Peer& peer, std::size_t parity);
  bool put_sums(Peer& peer, const LatencyPlaces& at, Entry& entry, Way& way);
  void cut_sums(Peer& peer, std::size_t parity);
  bool take_sums(Peer& peer, std::size_t parity);

  std::size_t row_bytes(std::uint32_t format) const;
  /// The row's record, just before it.
  std::byte* record_of(std::byte* row) const { return row - v_.layout.record_bytes; }
  std::byte* outbox() const { return parts_.data + parts_.layout.outbox; }
  std::byte* inbox() const { return parts_.data + parts_.layout.inbox; }
  /// What of `at`, in this rank's inbox, is in a peer's.
  protocol::Place there(const void* at) const {
    return {0, static_cast<std::uint64_t>(static_cast<const std::byte*>(at) - parts_.data)};
  }
  std::uint64_t* flag(CrossingKind kind, std::size_t parity, int source) const;
  std::uint64_t* acknowledged(CrossingKind kind, std::size_t parity, int rank) const;
  std::uint64_t* mask_line(int rank) const;
  float* weights_of(std::size_t parity, int source) const;
  void tell(const Peer& peer, CrossingKind kind, Generation generation, std::uint32_t what,
            std::uint64_t bytes);
  void acknowledge(const Peer& peer, CrossingKind kind, Generation generation);
  bool may_put(const Peer& peer, CrossingKind kind, const Way& way, Generation generation) const;
  static std::uint64_t tag(CrossingKind kind, Generation generation);
  [[noreturn]] void throw_violation(const Peer& peer, const std::string& what) const;

  CrossingParts parts_;
  const LatencyView& v_;
  int rank_;
  std::vector<Peer> peers_{};
  std::vector<std::byte> packed_{};
  std::uint64_t rejoined_ = 0;  ///< LatencyPlaces::rejoined of the last rejoin
};

/// Words that kernels or peers write meanwhile. Acquire: who sees one sees what came before it.
template <class T>
T load_word(const T* word) {
  return std::atomic_ref(*const_cast<T*>(word)).load(std::memory_order_acquire);
}
/// Release, for the same reason.
template <class T>
void store_word(T* word, T value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}
inline std::uint64_t tagged_word(std::uint32_t data, Generation generation) {
  return generation << 32 | data;
}
inline bool is_word_of(std::uint64_t word, Generation generation) {
  return static_cast<std::uint32_t>(word >> 32) == static_cast<std::uint32_t>(generation);
}

}  // namespace ferry::cuda
