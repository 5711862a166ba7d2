#include "fabric/ofi/ofi.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <ferry/error.hpp>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fabric/ofi/handshake_exchange.hpp"
#include "fabric/segment_handle.hpp"
#include "fabric/segment_table.hpp"
#include "fabric/shm/names.hpp"

namespace ferry::fabric {
namespace {

using ofi::EndpointSet;

/// How long a thread that waits for a peer polls before it sleeps; it does the endpoints' work
/// meanwhile.
constexpr std::chrono::nanoseconds kSpinTime = std::chrono::microseconds(100);
constexpr std::chrono::nanoseconds kShortSpinTime = std::chrono::microseconds(1);

/// A segment's handle: what every fabric says, and how each endpoint of a peer writes there.
struct OfiHandle {
  std::uint64_t base = 0;  // the same for all: an address or nothing
  std::array<std::uint64_t, kMaxOfiEndpoints> keys{};
  SegmentHandle segment{};
};
static_assert(sizeof(OfiHandle) <= kMaxHandleBytes);

class OfiFabric final : public Fabric {
 public:
  OfiFabric(int rank, int size, ofi::HandshakeResult result)
      : rank_(rank),
        size_(size),
        spin_time_(result.cores ? kSpinTime : kShortSpinTime),
        key_(result.key),
        local_(result.local),
        own_handshake_(std::move(result.own)),
        places_(std::move(result.places)),
        // In handles and for comparison only; the key itself never crosses the network.
        job_{siphash(result.key, ~0ull, 2), siphash(result.key, ~0ull, 3)},
        segments_(rank, size),
        own_(1),
        nics_(std::move(result.nics)),
        sets_(std::move(result.endpoint_sets)) {}

  ~OfiFabric() override {
    for (auto& set : sets_) {
      if (set->in_forked_child()) {
        static_cast<void>(set.release());  // the parent's
      } else {
        set->leave();
      }
    }
  }

  std::string_view name() const override { return "ofi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Segment register_memory(std::size_t bytes) override;
  Segment adopt(const Segment& segment) override;
  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override;
  void seal(SegmentId /*segment*/) override {}  // a handle names nothing that others could find
  void forget(int /*peer*/) noexcept override {}
  std::byte* pointer(int peer, SegmentId segment) const noexcept override;
  std::size_t bytes(int peer, SegmentId segment) const noexcept override {
    return segments_.bytes(peer, segment);
  }
  void put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) override;
  void put_pieces(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag) override;
  void set_look_up(std::function<void(int peer)> look_up) override {
    look_up_ = std::move(look_up);
  }
  void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
               std::uint64_t tag) override;
  PeerState peer_state(int peer) noexcept override;
  bool cut_off() const noexcept override { return sets_[0]->cut_off(); }
  std::chrono::nanoseconds spin_time() const noexcept override { return spin_time_; }
  bool progress() noexcept override {
    for (const auto& set : sets_) set->help();
    return true;
  }
  void hand_over() noexcept override {
    for (const auto& set : sets_) set->hand_over();
  }
  void rest() noexcept override {
    for (const auto& set : sets_) set->rest();
  }
  bool carries_texts() const noexcept override { return true; }
  void send_text(int peer, std::span<const std::byte> text) override {
    sets_[0]->send_text(peer, text);
  }
  void set_on_text(OnText on_text) override {
    for (const auto& set : sets_) set->set_on_text(on_text);  // the others tell of fences
  }
  void fence(int peer, std::uint64_t epoch) override {
    for (const auto& set : sets_) set->fence(peer, epoch);
  }
  bool fenced(int peer, std::uint64_t epoch) override {
    bool all = true;
    for (const auto& set : sets_) all = set->fenced(peer, epoch) && all;
    return all;
  }
  void exclude(int peer) noexcept override {
    for (const auto& set : sets_) set->exclude(peer);
  }
  JobKey job() const override { return job_; }
  std::vector<std::byte> invitation() const override {
    return to_bytes(ofi::Invitation{key_, own_handshake_.address, local_});
  }
  std::vector<std::byte> card() const override {
    return to_bytes(ofi::Card{own_handshake_, own_segments_});
  }
  void link(int peer, std::span<const std::byte> card, std::uint64_t since,
            const std::array<std::uint64_t, 2>& words) override;
  std::optional<LinkMessage> link_message(int peer, std::uint64_t since) override {
    return sets_[0]->link_message(peer, since);
  }
  std::optional<Knock> knock(int peer) override { return sets_[0]->knock(peer); }
  void attach_card(int peer, std::span<const std::byte> card) override {
    attach_all(peer, checked_card(peer, card));
  }
  Place place(int peer) const override { return places_[static_cast<std::size_t>(peer)]; }
  Place place_in(int peer, std::span<const std::byte> card) const override {
    return place_of(ofi::card_from(card, rank_, peer).handshake);
  }
  NetworkStats network_use() const noexcept override {
    return {put_bytes_.load(std::memory_order_relaxed), puts_.load(std::memory_order_relaxed),
            signals_.load(std::memory_order_relaxed)};
  }
  std::vector<NicStats> nics() const override;

 private:
  using OwnSignal = protocol::ArrivedSignal<protocol::Place>;

  /// Bits 40 to 55 of a tag tell latency exchanges apart; the group itself has 0 there.
  EndpointSet& set_of(std::uint64_t tag) {
    const std::uint64_t space = tag >> 40 & 0xffff;
    if (sets_.size() == 1 || space == 0 || tag == ~std::uint64_t{0}) return *sets_[0];
    return *sets_[1 + space % (sets_.size() - 1)];
  }
  ofi::Card checked_card(int peer, std::span<const std::byte> card) const;
  void attach_all(int peer, const ofi::Card& card);
  Segment exposed(Segment segment);
  void release_own(const OwnSignal& signal);

  int rank_;
  int size_;
  std::chrono::nanoseconds spin_time_;
  std::function<void(int peer)> look_up_{};
  JobKey key_;
  int local_;
  ofi::Handshake own_handshake_;
  std::vector<Place> places_;  // by rank
  std::vector<ofi::Card::Segment> own_segments_{};
  JobKey job_;
  SegmentTable segments_;  // peers' entries have no memory
  // Numbers for statistics: relaxed.
  std::atomic<std::uint64_t> put_bytes_{0};
  std::atomic<std::uint64_t> puts_{0};
  std::atomic<std::uint64_t> signals_{0};
  std::mutex own_mutex_;
  std::map<protocol::Place, std::uint64_t> own_sequences_;
  protocol::CountedSignals<protocol::Place> own_;   // what this rank tells itself
  std::vector<NicStats> nics_;                      // without what they carried
  std::vector<std::unique_ptr<EndpointSet>> sets_;  // last: they end before the memory
};

Segment OfiFabric::register_memory(std::size_t bytes) {
  auto memory = anonymous_memory(bytes, rank_);
  const SegmentId id = segments_.next();
  return exposed({id, memory->data(), bytes, {}, memory});
}

Segment OfiFabric::adopt(const Segment& segment) {
  segments_.check_adopted(segment, "the network");
  return exposed(segment);
}

Segment OfiFabric::exposed(Segment segment) {
  OfiHandle handle;
  handle.segment = {
      .way = Wire::ofi, .rank = rank_, .segment = segment.id, .bytes = segment.bytes, .job = job_};
  try {
    std::span<std::uint64_t> keys(handle.keys);
    for (const auto& set : sets_) {
      handle.base = set->expose(segment.id, segment.data, segment.bytes, keys.first(nics_.size()));
      keys = keys.subspan(nics_.size());
    }
  } catch (...) {
    for (const auto& set : sets_) set->withdraw(segment.id);
    throw;
  }
  const auto* first = reinterpret_cast<const std::byte*>(&handle);
  segment.handle.assign(first, first + sizeof handle);
  segments_.add(rank_, segment.id, segment.memory, segment.bytes);
  own_segments_.push_back({segment.id, segment.bytes, segment.handle});
  return segment;
}

/// Throws what `attach` does for one that cannot be.
OfiHandle handle_in(std::span<const std::byte> handle, const Attachment& attachment) {
  OfiHandle theirs;
  if (handle.size() != sizeof theirs) {
    throw_attach(attachment, "its handle has " + std::to_string(handle.size()) +
                                 " bytes, expected " + std::to_string(sizeof theirs));
  }
  checked_handle(handle.last(sizeof(SegmentHandle)), attachment);
  std::memcpy(&theirs, handle.data(), sizeof theirs);
  return theirs;
}

void OfiFabric::attach(int peer, SegmentId segment, std::size_t bytes,
                       std::span<const std::byte> handle) {
  check_peer(peer, size_, rank_, "attach");
  if (peer == rank_) return;
  const Attachment attachment{Wire::ofi, rank_, peer, segment, bytes, job_};
  const OfiHandle theirs = handle_in(handle, attachment);
  if (sets_[0]->left(peer)) throw_attach(attachment, "the rank left");
  if (segment < kMaxSegments && segments_.find(peer, segment) == nullptr) {
    for (const auto& set : sets_) set->attach(peer, segment, theirs.base, theirs.keys);
  }
  segments_.add(peer, segment, nullptr, bytes);
}

ofi::Card OfiFabric::checked_card(int peer, std::span<const std::byte> card) const {
  const ofi::Card theirs = ofi::card_from(card, rank_, peer);
  ofi::check_joined(own_handshake_, rank_, theirs.handshake, peer);
  std::set<SegmentId> named;
  for (const ofi::Card::Segment& segment : theirs.segments) {
    const Attachment attachment{Wire::ofi, rank_, peer, segment.id, segment.bytes, job_};
    handle_in(segment.handle, attachment);
    if (segment.id >= kMaxSegments || !named.insert(segment.id).second) {
      throw_attach(attachment, "its card cannot name such a segment, or not twice");
    }
  }
  return theirs;
}

void OfiFabric::attach_all(int peer, const ofi::Card& card) {
  segments_.clear(peer);
  for (const ofi::Card::Segment& segment : card.segments) {
    attach(peer, segment.id, segment.bytes, segment.handle);
  }
}

void OfiFabric::link(int peer, std::span<const std::byte> card, std::uint64_t since,
                     const std::array<std::uint64_t, 2>& words) {
  const ofi::Card theirs = checked_card(peer, card);
  const LinkMessage mine{words, this->card()};
  if (mine.card.size() > ofi::kMaxPayload) {
    throw Error(ErrorKind::exhausted,
                "rank " + std::to_string(rank_) + ": its card of " +
                    std::to_string(own_segments_.size()) + " segments has " +
                    std::to_string(mine.card.size()) + " bytes, more than a message takes",
                {.rank = rank_, .peer = peer});
  }
  for (std::size_t endpoint = 0; endpoint < sets_.size(); ++endpoint) {
    sets_[endpoint]->link(
        peer, partners_of(rank_, own_handshake_, peer, theirs.handshake, endpoint), since);
  }
  attach_all(peer, theirs);
  places_[static_cast<std::size_t>(peer)] = place_of(theirs.handshake);
  sets_[0]->send_link_message(peer, since, mine);
}

std::byte* OfiFabric::pointer(int peer, SegmentId segment) const noexcept {
  const SegmentTable::Entry* entry = peer == rank_ ? segments_.find(peer, segment) : nullptr;
  return entry == nullptr ? nullptr : entry->memory->data();
}

void OfiFabric::put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) {
  if (!sets_[0]->reaches(peer)) return;
  const auto& entry = segments_.checked(peer, to, bytes, "put");
  if (bytes == 0) return;
  if (peer != rank_) {
    put_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    puts_.fetch_add(1, std::memory_order_relaxed);
    const Piece whole{from, bytes};
    set_of(tag).put(peer, to, {&whole, 1}, tag, look_up_);
    return;
  }
  std::memcpy(entry.memory->data() + to.offset, from, bytes);
  const std::lock_guard lock(own_mutex_);
  own_.piece(0, tag, bytes, [this](int, const OwnSignal& signal) { release_own(signal); });
}

void OfiFabric::put_pieces(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag) {
  if (peer == rank_) return Fabric::put_pieces(peer, to, pieces, tag);
  if (!sets_[0]->reaches(peer)) return;
  std::size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  segments_.checked(peer, to, bytes, "put");
  put_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  puts_.fetch_add(1, std::memory_order_relaxed);
  set_of(tag).put(peer, to, pieces, tag, look_up_);
}

void OfiFabric::publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
                        std::uint64_t tag) {
  if (!sets_[0]->reaches(peer)) return;
  segments_.checked_flag(peer, flag, "publish");
  if (peer != rank_) {
    signals_.fetch_add(1, std::memory_order_relaxed);
    set_of(tag).publish(peer, flag, value, bytes, tag);
    return;
  }
  const std::lock_guard lock(own_mutex_);
  const protocol::Place place{flag.segment, flag.offset};
  const OwnSignal signal{++own_sequences_[place], place, value, tag, bytes};
  own_.signal(0, signal, [this](int, const OwnSignal& done) { release_own(done); });
}

void OfiFabric::release_own(const OwnSignal& signal) {
  std::byte* base = pointer(rank_, signal.flag.segment);
  auto* word = reinterpret_cast<std::uint64_t*>(base + signal.flag.offset);
  protocol::publish_in_memory(protocol::Flag{word}, signal.value);
}

PeerState OfiFabric::peer_state(int peer) noexcept {
  if (peer < 0 || peer >= size_) return PeerState::unknown;
  if (peer == rank_) return PeerState::alive;
  auto silent = sets_[0]->silent_for(peer);
  for (const auto& set : sets_) {
    if (set->lost(peer)) return PeerState::dead;
    silent = std::min(silent, set->silent_for(peer));
  }
  return silent > ofi::kSilent && !sets_[0]->left(peer) ? PeerState::unknown : PeerState::alive;
}

std::vector<NicStats> OfiFabric::nics() const {
  std::vector<NicStats> used = nics_;
  for (std::size_t nic = 0; nic < used.size(); ++nic) {
    for (const auto& set : sets_) used[nic].bytes += set->sent(nic);
  }
  return used;
}

}  // namespace

bool ofi_is_built() noexcept {
  return true;
}

std::unique_ptr<Fabric> make_ofi_fabric(Bootstrap& bootstrap, const OfiOptions& options,
                                        std::chrono::nanoseconds deadline, const OnWait& on_wait,
                                        const std::string& gpu) {
  ofi::HandshakeResult result =
      ofi::exchange_handshakes(bootstrap, options, gpu, deadline, on_wait);
  return std::make_unique<OfiFabric>(bootstrap.rank(), bootstrap.size(), std::move(result));
}

std::unique_ptr<Fabric> join_ofi_fabric(int rank, int size, const OfiOptions& options,
                                        std::span<const std::byte> invitation,
                                        std::chrono::nanoseconds deadline,
                                        const std::string& own_address) {
  ofi::Invitation read = ofi::invitation_from(invitation, rank);
  if (!own_address.empty()) read.address = own_address;
  return std::make_unique<OfiFabric>(rank, size,
                                     ofi::join_handshakes(rank, size, options, read, deadline));
}

std::unique_ptr<Fabric> begin_ofi_fabric(int rank, int size, const OfiOptions& options, int local,
                                         std::chrono::nanoseconds deadline,
                                         const std::string& own_address) {
  const ofi::Invitation own{random_key(rank), own_address, local};
  return std::make_unique<OfiFabric>(rank, size,
                                     ofi::join_handshakes(rank, size, options, own, deadline));
}

}  // namespace ferry::fabric
