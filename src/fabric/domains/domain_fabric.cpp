#include "fabric/domains/domain_fabric.hpp"

#include <atomic>
#include <cstring>
#include <ferry/error.hpp>
#include <string>
#include <utility>

#include "fabric/lobby.hpp"
#include "fabric/segment_handle.hpp"
#include "fabric/segment_table.hpp"

namespace ferry::fabric {
namespace {

/// Two handles in one: how long the first is, then both.
std::vector<std::byte> joined(const std::vector<std::byte>& inside,
                              const std::vector<std::byte>& network, int rank) {
  const auto first = static_cast<std::uint32_t>(inside.size());
  std::vector<std::byte> both(sizeof first);
  std::memcpy(both.data(), &first, sizeof first);
  both.insert(both.end(), inside.begin(), inside.end());
  both.insert(both.end(), network.begin(), network.end());
  if (both.size() > kMaxHandleBytes) {
    throw Error(ErrorKind::system,
                "rank " + std::to_string(rank) + ": the handle of a segment has " +
                    std::to_string(both.size()) + " bytes, more than fit a message (" +
                    std::to_string(kMaxHandleBytes) + ")",
                {.rank = rank});
  }
  return both;
}

struct Handles {
  std::span<const std::byte> inside{};
  std::span<const std::byte> network{};
};

/// The handle comes from the peer.
Handles split(std::span<const std::byte> both, const Attachment& attachment) {
  std::uint32_t first = 0;
  if (both.size() >= sizeof first) std::memcpy(&first, both.data(), sizeof first);
  if (both.size() < sizeof first || first > both.size() - sizeof first) {
    throw_attach(attachment, "a handle of " + std::to_string(both.size()) +
                                 " bytes is not that of two fabrics");
  }
  return {both.subspan(sizeof first, first), both.subspan(sizeof first + first)};
}

class DomainFabric final : public Fabric, public Lobby {
 public:
  DomainFabric(const Domains& domains, std::unique_ptr<Fabric> inside,
               std::unique_ptr<Fabric> network)
      : domains_(domains),
        inside_(std::move(inside)),
        network_(std::move(network)),
        name_(std::string(inside_->name()) + "+" +
              std::string(network_ ? network_->name() : "copies")) {}

  std::string_view name() const override { return name_; }
  int rank() const override { return inside_->rank(); }
  int size() const override { return inside_->size(); }

  Segment register_memory(std::size_t bytes) override;
  void attach(int peer, SegmentId segment, std::size_t bytes,
              std::span<const std::byte> handle) override;
  void seal(SegmentId segment) override;
  void forget(int peer) noexcept override;
  std::byte* pointer(int peer, SegmentId segment) const noexcept override {
    return in_domain(peer) ? inside_->pointer(peer, segment) : nullptr;
  }
  std::size_t bytes(int peer, SegmentId segment) const noexcept override {
    return way(peer).bytes(peer, segment);
  }
  void put(int peer, Address to, const void* from, std::size_t bytes, std::uint64_t tag) override;
  void put_pieces(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag) override;
  void set_look_up(std::function<void(int peer)> look_up) override {
    if (network_) network_->set_look_up(std::move(look_up));
  }
  void publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
               std::uint64_t tag) override;
  PeerState peer_state(int peer) noexcept override { return way(peer).peer_state(peer); }
  bool peer_ends(int peer) noexcept override { return way(peer).peer_ends(peer); }
  bool cut_off() const noexcept override { return network_ && network_->cut_off(); }
  std::chrono::nanoseconds spin_time() const noexcept override {
    return network_ ? network_->spin_time() : inside_->spin_time();
  }
  bool progress() noexcept override {
    return network_ ? network_->progress() : inside_->progress();
  }
  void hand_over() noexcept override {
    if (network_) network_->hand_over();
  }
  void rest() noexcept override {
    if (network_) network_->rest();
  }
  bool carries_texts() const noexcept override { return network_ && network_->carries_texts(); }
  void send_text(int peer, std::span<const std::byte> text) override {
    way(peer).send_text(peer, text);
  }
  void set_on_text(OnText on_text) override {
    if (network_) network_->set_on_text(std::move(on_text));
  }
  void fence(int peer, std::uint64_t epoch) override { way(peer).fence(peer, epoch); }
  bool fenced(int peer, std::uint64_t epoch) override { return way(peer).fenced(peer, epoch); }
  void exclude(int peer) noexcept override { way(peer).exclude(peer); }
  JobKey job() const override { return network_ ? network_->job() : JobKey{}; }
  std::vector<std::byte> invitation() const override { return network_->invitation(); }
  std::vector<std::byte> card() const override { return network_->card(); }
  void link(int peer, std::span<const std::byte> card, std::uint64_t since,
            const std::array<std::uint64_t, 2>& words) override {
    way(peer).link(peer, card, since, words);
  }
  std::optional<LinkMessage> link_message(int peer, std::uint64_t since) override {
    return way(peer).link_message(peer, since);
  }

  std::optional<Knock> knock(int peer) override { return way(peer).knock(peer); }
  void attach_card(int peer, std::span<const std::byte> card) override {
    way(peer).attach_card(peer, card);
  }
  Place place(int peer) const override { return way(peer).place(peer); }
  Place place_in(int peer, std::span<const std::byte> card) const override {
    return (network_ ? *network_ : *inside_).place_in(peer, card);  // of which the card is
  }

  // Those of this domain meet in the lobby of `inside_`.
  Lobby* lobby() noexcept override {
    return carries_texts() && inside_->lobby() != nullptr ? this : nullptr;
  }
  bool is_open() const override { return inside_->lobby()->is_open(); }
  void open(const Opening& opening) override { inside_->lobby()->open(opening); }
  void show(std::span<const std::byte> card) override { inside_->lobby()->show(card); }
  const Opening& opening() const override { return inside_->lobby()->opening(); }
  JobKey group() const override { return inside_->lobby()->group(); }
  bool has(int rank) const override { return in_domain(rank); }
  void close() noexcept override { inside_->lobby()->close(); }
  std::vector<Visitor> visitors() override {
    std::vector<Visitor> all = inside_->lobby()->visitors();
    std::erase_if(all, [this](const Visitor& visitor) { return !in_domain(visitor.rank); });
    return all;
  }
  std::vector<Elsewhere> elsewhere() override {
    std::vector<Elsewhere> far;
    for (Visitor& visitor : inside_->lobby()->visitors()) {
      if (in_domain(visitor.rank) || visitor.card.empty()) continue;
      far.push_back({visitor.rank, std::move(visitor.card)});
    }
    return far;
  }
  void seat(int rank, std::uint64_t ticket) override { inside_->lobby()->seat(rank, ticket); }
  bool former_runs(const AtRest& at_rest) override {
    return inside_->lobby()->former_runs(at_rest);
  }
  void vacate(int rank) override { inside_->lobby()->vacate(rank); }

  NetworkStats network_use() const noexcept override;
  std::vector<NicStats> nics() const override {
    return network_ ? network_->nics() : std::vector<NicStats>();
  }

 private:
  bool in_domain(int peer) const noexcept {
    return peer >= 0 && peer < domains_.ranks() && domains_.together(peer, rank());
  }
  Fabric& way(int peer) const noexcept {
    return in_domain(peer) || !network_ ? *inside_ : *network_;
  }

  Domains domains_;
  std::unique_ptr<Fabric> inside_;
  std::unique_ptr<Fabric> network_;  // null: the others are reached by `inside_`, too
  std::string name_;
  // Numbers for statistics: relaxed.
  std::atomic<std::uint64_t> put_bytes_{0};
  std::atomic<std::uint64_t> puts_{0};
  std::atomic<std::uint64_t> signals_{0};
};

Segment DomainFabric::register_memory(std::size_t bytes) {
  Segment segment = inside_->register_memory(bytes);
  if (!network_) return segment;
  try {
    segment.handle = joined(segment.handle, network_->adopt(segment).handle, rank());
  } catch (...) {
    inside_->seal(segment.id);  // nobody will attach it; its number stays taken
    throw;
  }
  return segment;
}

void DomainFabric::attach(int peer, SegmentId segment, std::size_t bytes,
                          std::span<const std::byte> handle) {
  check_peer(peer, size(), rank(), "attach");
  if (!network_) return inside_->attach(peer, segment, bytes, handle);
  const Handles two =
      split(handle, {.self = rank(), .peer = peer, .segment = segment, .bytes = bytes});
  way(peer).attach(peer, segment, bytes, in_domain(peer) ? two.inside : two.network);
}

void DomainFabric::seal(SegmentId segment) {
  inside_->seal(segment);
  if (network_) network_->seal(segment);
}

void DomainFabric::forget(int peer) noexcept {
  way(peer).forget(peer);
}

void DomainFabric::put(int peer, Address to, const void* from, std::size_t bytes,
                       std::uint64_t tag) {
  way(peer).put(peer, to, from, bytes, tag);
  if (in_domain(peer)) return;
  put_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  puts_.fetch_add(1, std::memory_order_relaxed);
}

void DomainFabric::put_pieces(int peer, Address to, std::span<const Piece> pieces,
                              std::uint64_t tag) {
  way(peer).put_pieces(peer, to, pieces, tag);
  if (in_domain(peer)) return;
  for (const Piece& piece : pieces) put_bytes_.fetch_add(piece.bytes, std::memory_order_relaxed);
  puts_.fetch_add(1, std::memory_order_relaxed);
}

void DomainFabric::publish(int peer, Address flag, std::uint64_t value, std::uint64_t bytes,
                           std::uint64_t tag) {
  way(peer).publish(peer, flag, value, bytes, tag);
  if (!in_domain(peer)) signals_.fetch_add(1, std::memory_order_relaxed);
}

NetworkStats DomainFabric::network_use() const noexcept {
  return {put_bytes_.load(std::memory_order_relaxed), puts_.load(std::memory_order_relaxed),
          signals_.load(std::memory_order_relaxed)};
}

}  // namespace

std::unique_ptr<Fabric> make_domain_fabric(const Domains& domains, std::unique_ptr<Fabric> inside,
                                           std::unique_ptr<Fabric> network) {
  return std::make_unique<DomainFabric>(domains, std::move(inside), std::move(network));
}

}  // namespace ferry::fabric
