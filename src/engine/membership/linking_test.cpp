// What a rank takes from other domains: texts of the membership, and how it and a process that
// joins link each other. The network is a fake that keeps what is sent.
#include "engine/membership/linking.hpp"

#include <bit>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "engine/test_groups.hpp"
#include "fabric/memory.hpp"

namespace ferry::engine::test {
namespace {

using Said = Member::Said;

constexpr int kSeats = 4;  // 0 1, 2 3
constexpr std::uint64_t kTicket = fabric::kTicketBit | 77;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

/// Rank 0's.
class FakeNetwork final : public fabric::Fabric {
 public:
  std::string_view name() const override { return "fake"; }
  int rank() const override { return 0; }
  int size() const override { return kSeats; }
  fabric::Segment register_memory(std::size_t bytes) override {
    auto memory = fabric::anonymous_memory(bytes, rank());
    return {0, memory->data(), bytes, {}, memory};
  }
  void attach(int, fabric::SegmentId, std::size_t, std::span<const std::byte>) override {}
  void seal(fabric::SegmentId) override {}
  void forget(int) noexcept override {}
  std::byte* pointer(int, fabric::SegmentId) const noexcept override { return nullptr; }
  std::size_t bytes(int peer, fabric::SegmentId) const noexcept override {
    return peer == rank() ? 4096 : control_bytes_;
  }
  void put(int, fabric::Address, const void*, std::size_t, std::uint64_t) override {}
  void publish(int, fabric::Address, std::uint64_t, std::uint64_t, std::uint64_t) override {}
  fabric::PeerState peer_state(int) noexcept override { return fabric::PeerState::alive; }

  bool carries_texts() const noexcept override { return true; }
  void set_on_text(OnText on_text) override { on_text_ = std::move(on_text); }
  void send_text(int peer, std::span<const std::byte> text) override {
    std::memcpy(&told_[peer], text.data(), sizeof(std::uint64_t));
  }
  void link(int peer, std::span<const std::byte> card, std::uint64_t epoch,
            const std::array<std::uint64_t, 2>&) override {
    if (refuses_) throw Error(ErrorKind::mismatch, "such a card cannot be");
    linked_[peer] = {card.begin(), card.end()};
    epochs_[peer] = epoch;
  }
  std::optional<LinkMessage> link_message(int peer, std::uint64_t epoch) override {
    const auto came = messages_.find({peer, epoch});
    if (came == messages_.end()) return std::nullopt;
    return came->second;
  }
  std::optional<Knock> knock(int peer) override {
    const auto came = knocks_.find(peer);
    if (came == knocks_.end()) return std::nullopt;
    return Knock{came->second, *link_message(peer, came->second)};
  }
  void attach_card(int peer, std::span<const std::byte> card) override {
    attached_[peer] = {card.begin(), card.end()};
  }
  fabric::Place place(int peer) const override {
    const auto there = places_.find(peer);
    return there == places_.end() ? fabric::Place{} : there->second;
  }
  /// A card says the kernel.
  fabric::Place place_in(int, std::span<const std::byte> card) const override {
    if (refuses_) throw Error(ErrorKind::mismatch, "such a card cannot be");
    return {{reinterpret_cast<const char*>(card.data()), card.size()}, "processes", ""};
  }

  OnText on_text_{};
  bool refuses_ = false;
  std::size_t control_bytes_ = 4096;  // of each peer
  std::map<int, std::vector<std::byte>> linked_{};
  std::map<int, std::uint64_t> epochs_{};
  std::map<std::pair<int, std::uint64_t>, LinkMessage> messages_{};
  std::map<int, std::uint64_t> knocks_{};  // the last ticket
  std::map<int, std::vector<std::byte>> attached_{};
  std::map<int, fabric::Place> places_{};
  std::map<int, std::uint64_t> told_{};  // the kind of the last text
};

/// The form of what a carrier sends (carrier.hpp).
struct Text {
  std::uint64_t kind = 0, seat = 0, about = 0;
  Said said{};
};
constexpr std::uint64_t kStatement = 1, kLast = 2, kEvicted = 3, kWaits = 4, kMemory = 5;

struct Rank {
  GroupConfig config;
  std::shared_ptr<Memory> memory = std::make_shared<Memory>(std::make_unique<FakeNetwork>());
  FakeNetwork& network = static_cast<FakeNetwork&>(*memory->fabric);
  ControlLayout layout = make_control_layout(kSeats, 1024);
  fabric::Segment control = network.register_memory(layout.bytes);
  std::shared_ptr<Carrier> carrier =
      Carrier::make(network, Domains::blocks(kSeats, 2), control.data, layout);
  Channel channel{memory, config, control, layout};

  void comes(int peer, const Text& text, const std::string& card = {}) {
    const auto head = std::as_bytes(std::span(&text, 1));
    std::vector<std::byte> all(head.begin(), head.end());
    const auto rest = bytes_of(card);
    all.insert(all.end(), rest.begin(), rest.end());
    network.on_text_(peer, all);
  }
  std::uint64_t evicted() const {
    return *reinterpret_cast<const std::uint64_t*>(control.data + layout.evicted);
  }
  /// Whether anything of what came was taken.
  bool took_any() {
    std::uint64_t seen = 0;
    for (int seat = 0; seat < kSeats; ++seat) {
      if (carrier->heard(seat, seen) || carrier->last(seat) || carrier->waiting(seat) ||
          carrier->asks(seat)) {
        return true;
      }
    }
    return evicted() != 0;
  }
};

Said said_of(std::uint64_t epoch, std::uint64_t number, std::uint64_t ticket = 0) {
  Said said;
  said.epoch = epoch;
  said.number = number;
  said.ticket = ticket;
  return said;
}

TEST(Carrier, TakesWhatAPeerMaySay) {
  Rank rank;
  rank.comes(2, {kStatement, 2, 0, said_of(3, 1)});
  std::uint64_t seen = 0;
  ASSERT_TRUE(rank.carrier->heard(2, seen));
  EXPECT_FALSE(rank.carrier->heard(2, seen)) << "once";
  rank.comes(2, {kStatement, 2, 0, said_of(2, 9)});
  EXPECT_FALSE(rank.carrier->heard(2, seen)) << "older";
  rank.comes(2, {kLast, 3, 0, said_of(3, 4)});
  EXPECT_TRUE(rank.carrier->last(3));
  rank.comes(2, {kWaits, 3, 3, said_of(0, 1, kTicket)}, "card");
  ASSERT_TRUE(rank.carrier->waiting(3));
  EXPECT_EQ(rank.carrier->waiting(3)->card, bytes_of("card"));
  rank.comes(3, {kWaits, 3, 7, said_of(0, 1, kTicket)});
  ASSERT_TRUE(rank.carrier->asks(3)) << "of itself, without a card";
  EXPECT_EQ(rank.carrier->asks(3)->epoch, 7u);
  EXPECT_EQ(rank.carrier->waiting(3)->epoch, 3u);
  rank.comes(2, {kEvicted, 0, 0, said_of(5, 0)});
  EXPECT_EQ(rank.evicted(), 5u);
}

TEST(Carrier, LeavesWhatCannotBe) {
  Rank rank;
  Said wide = said_of(3, 1);
  wide.suspects.add(kSeats);
  Said beyond = said_of(3, 1);
  beyond.view.live.add(SeatTraits::kSeats - 1);
  Said nobody = said_of(3, 1);
  nobody.proposal.joins[0] = {2, kTicket};  // who is not in it
  Said far_seat = nobody;
  far_seat.proposal.joins[0].seat = ~std::uint64_t{0};
  struct Case {
    const char* what;
    int peer;
    Text text;
    const char* card = "";
  };
  for (const Case& bad :
       {Case{"of its own domain", 1, {kStatement, 1, 0, said_of(3, 1)}},
        Case{"for another", 2, {kStatement, 3, 0, said_of(3, 1)}},
        Case{"a seat beyond", 2, {kLast, kSeats, 0, said_of(3, 1)}},
        Case{"a wide seat", 2, {kLast, ~std::uint64_t{0}, 0, said_of(3, 1)}},
        Case{"a death in another domain", 2, {kLast, 1, 0, said_of(3, 1)}},
        Case{"a joiner's statement", 2, {kStatement, 2, 0, said_of(0, 1)}},
        Case{"a statement with a card", 2, {kStatement, 2, 0, said_of(3, 1)}, "c"},
        Case{"suspects beyond", 2, {kStatement, 2, 0, wide}},
        Case{"a view beyond", 2, {kStatement, 2, 0, beyond}},
        Case{"a joiner that is not there", 2, {kStatement, 2, 0, nobody}},
        Case{"a joiner beyond", 2, {kStatement, 2, 0, far_seat}},
        Case{"no such kind", 2, {0, 2, 0, said_of(3, 1)}},
        Case{"no such kind", 2, {9, 2, 0, said_of(3, 1)}},
        Case{"another is evicted", 2, {kEvicted, 1, 0, said_of(3, 0)}},
        Case{"evicted in no epoch", 2, {kEvicted, 0, 0, said_of(0, 0)}},
        Case{"waits without a card", 2, {kWaits, 3, 3, said_of(0, 1, kTicket)}},
        Case{"waits itself, with a card", 3, {kWaits, 3, 3, said_of(0, 1, kTicket)}, "c"},
        Case{"waits, a member", 2, {kWaits, 3, 3, said_of(2, 1, kTicket)}, "c"},
        Case{"waits, no ticket", 2, {kWaits, 3, 3, said_of(0, 1)}, "c"},
        Case{"waits in this domain", 2, {kWaits, 1, 3, said_of(0, 1, 7)}, "c"}}) {
    rank.comes(bad.peer, bad.text, bad.card);
    EXPECT_FALSE(rank.took_any()) << bad.what;
  }
  const Text good{kStatement, 2, 0, said_of(3, 1)};
  for (std::size_t bytes = 1; bytes < sizeof good; ++bytes) {
    rank.network.on_text_(2, std::as_bytes(std::span(&good, 1)).first(bytes));
  }
  EXPECT_FALSE(rank.took_any()) << "truncated";
}

TEST(Carrier, NothingOfAFormerHolderOfASeatCounts) {
  Rank rank;
  rank.comes(2, {kStatement, 2, 0, said_of(3, 8)});
  rank.comes(3, {kLast, 2, 0, said_of(3, 8)});
  rank.carrier->seat(2, kTicket);
  EXPECT_FALSE(rank.carrier->last(2));
  rank.comes(2, {kStatement, 2, 0, said_of(4, 1)});
  rank.comes(3, {kLast, 2, 0, said_of(3, 8)});
  rank.comes(3, {kLast, 2, kTicket + 1, said_of(3, 8, kTicket + 1)});
  std::uint64_t seen = 0;
  if (const auto said = rank.carrier->heard(2, seen)) {
    EXPECT_EQ(said->epoch, 0u) << "of the former one";
  }
  EXPECT_FALSE(rank.carrier->last(2));
  rank.comes(2, {kStatement, 2, 0, said_of(4, 1, kTicket)});
  ASSERT_TRUE(rank.carrier->heard(2, seen));
  rank.comes(3, {kLast, 2, kTicket, {}});  // it died before it said anything
  EXPECT_TRUE(rank.carrier->last(2));
}

Member::View view_of(std::uint64_t epoch, int joins, std::uint64_t ticket) {
  Member::View view;
  view.epoch = epoch;
  view.step = 10;
  view.live = Member::Seats::first(kSeats);
  if (ticket != 0) view.joins[0] = {static_cast<std::uint64_t>(joins), ticket};
  return view;
}

struct Links {
  explicit Links(std::uint64_t own_ticket = 0)
      : linking(rank.network, rank.carrier, rank.channel, own_ticket) {}

  Rank rank;
  Linking linking;
  Member::Seats live = Member::Seats::first(kSeats);
  Member::Seats failed{};

  std::vector<int> advance() { return linking.advance(live, failed); }
  void waits(std::uint64_t ticket, const std::string& card) {
    rank.comes(3, {kWaits, 2, 4, said_of(0, 1, ticket)}, card);
  }
};

using None = std::vector<int>;

TEST(Linking, AProcessThatJoinsIsLinkedByTheCardThatItsDomainSends) {
  Links links;
  EXPECT_FALSE(links.linking.any());
  links.linking.begin(2, view_of(5, 2, kTicket), kTicket);
  EXPECT_TRUE(links.linking.pending(2) && links.linking.untouched(2));
  links.waits(kTicket + 1, "another's");
  EXPECT_EQ(links.advance(), None());
  EXPECT_TRUE(links.rank.network.linked_.empty())
      << "the card of a process that is not in the view";
  links.waits(kTicket, "its own");
  EXPECT_EQ(links.advance(), None());
  EXPECT_EQ(links.rank.network.linked_[2], bytes_of("its own"));
  EXPECT_EQ(links.rank.network.epochs_[2], 5u);
  EXPECT_FALSE(links.linking.untouched(2)) << "it may write here";
  links.rank.network.messages_[{2, 4}] = {{0, kTicket}, {}};
  EXPECT_EQ(links.advance(), None()) << "a message of another epoch";
  EXPECT_TRUE(links.linking.pending(2));
  links.rank.network.messages_[{2, 5}] = {{Channel::kJoining, kTicket}, {}};
  EXPECT_EQ(links.advance(), std::vector<int>{2});
  EXPECT_FALSE(links.linking.pending(2));
  EXPECT_EQ(links.linking.since(2), 5u);
  EXPECT_EQ(links.linking.joined_at(2), 11u);
  EXPECT_EQ(links.advance(), None()) << "once";
  EXPECT_TRUE(links.failed.empty());
}

TEST(Linking, AProcessThatHasJoinedLearnsWhoTheOthersAre) {
  Links links(kTicket + 9);
  EXPECT_TRUE(links.linking.pending(2));
  links.linking.begin(2, view_of(5, 0, 0), 0);
  links.linking.begin(3, view_of(5, 0, 0), 0);
  links.waits(kTicket, "no card is sent on for a rank that has its seat");
  EXPECT_EQ(links.advance(), None());
  EXPECT_TRUE(links.rank.network.linked_.empty());
  links.rank.network.messages_[{2, 5}] = {{0, 0}, bytes_of("founder")};
  links.rank.network.messages_[{3, 5}] = {{7, kTicket}, bytes_of("joined at step 6")};
  EXPECT_EQ(links.advance(), (std::vector<int>{2, 3}));
  EXPECT_EQ(links.rank.network.linked_[2], bytes_of("founder"));
  EXPECT_EQ(links.linking.joined_at(2), 0u);
  EXPECT_EQ(links.linking.joined_at(3), 7u);
  // From now on it is the one with that ticket.
  links.rank.comes(3, {kStatement, 3, 0, said_of(5, 1)});
  std::uint64_t seen = 0;
  EXPECT_FALSE(links.rank.carrier->heard(3, seen));
  links.rank.comes(3, {kStatement, 3, 0, said_of(5, 1, kTicket)});
  EXPECT_TRUE(links.rank.carrier->heard(3, seen));
}

TEST(Linking, MemoryIsHeldBackForThoseAloneWhoCouldWriteThere) {
  Links joined(kTicket + 9), founder;
  joined.linking.begin(2, view_of(5, 0, 0), 0);
  EXPECT_FALSE(joined.linking.former_may_write()) << "nobody could before";
  joined.rank.network.messages_[{2, 5}] = {{0, 0}, bytes_of("founder")};
  EXPECT_EQ(joined.advance(), std::vector<int>{2});
  joined.linking.begin(2, view_of(6, 2, kTicket), kTicket);
  EXPECT_TRUE(joined.linking.former_may_write());
  founder.linking.begin(2, view_of(5, 2, kTicket), kTicket);
  EXPECT_TRUE(founder.linking.former_may_write());
}

TEST(Linking, ACardThatCannotBeNamesItsSeat) {
  Links links;
  links.linking.begin(2, view_of(5, 2, kTicket), kTicket);
  links.waits(kTicket, "bad");
  for (const bool refuses : {true, false}) {
    links.rank.network.refuses_ = refuses;
    links.rank.network.control_bytes_ = 4095;  // flags would be written beyond its end
    links.failed = {};
    EXPECT_EQ(links.advance(), None());
    EXPECT_EQ(links.failed, Member::Seats::of(2));
  }
  EXPECT_TRUE(links.linking.pending(2) && links.linking.untouched(2));
}

struct Knocks : Links {
  using Links::Links;
  /// The rank has linked this one under that ticket.
  void comes(int from, std::uint64_t ticket, const std::string& card, std::uint64_t own_ticket) {
    rank.network.knocks_[from] = ticket;
    rank.network.messages_[{from, ticket}] = {{Channel::kJoining, own_ticket}, bytes_of(card)};
  }
  void tells_memory(int from, std::uint64_t ticket, const std::string& card) {
    rank.comes(from, {kMemory, static_cast<std::uint64_t>(from), ticket, {}}, card);
  }
  /// And forgets that it did.
  bool links(int peer, const std::string& card, std::uint64_t since) {
    const auto linked = std::exchange(rank.network.linked_[peer], {});
    return linked == bytes_of(card) && rank.network.epochs_[peer] == since;
  }
};

TEST(Linking, WhoeverKnocksIsLinkedBeforeItHasItsSeat) {
  Knocks links;
  EXPECT_EQ(links.linking.answer(2), 0u) << "nobody knocks";
  links.comes(2, kTicket, "its own", kTicket + 1);
  EXPECT_EQ(links.linking.answer(2), 0u) << "a ticket that is not its own";
  links.comes(2, kTicket, "its own", kTicket);
  EXPECT_EQ(links.linking.answer(2), kTicket);
  EXPECT_TRUE(links.links(2, "its own", kTicket));
  EXPECT_EQ(links.linking.answer(2), kTicket);
  EXPECT_TRUE(links.links(2, "", kTicket)) << "once";
  links.linking.begin(2, view_of(5, 2, kTicket), kTicket);
  EXPECT_EQ(links.rank.network.told_[2], 0u);
  EXPECT_EQ(links.advance(), std::vector<int>{2});
  EXPECT_EQ(links.rank.network.told_[2], kMemory) << "it may have grown since";
  EXPECT_TRUE(links.links(2, "", kTicket)) << "as it is";
  EXPECT_EQ(links.linking.since(2), 5u);
  EXPECT_EQ(links.linking.joined_at(2), 11u);
}

TEST(Linking, ACardOfOneThatKnocksIsTriedOnce) {
  Knocks links;
  links.comes(2, kTicket, "bad", kTicket);
  links.rank.network.refuses_ = true;
  EXPECT_EQ(links.linking.answer(2), 0u);
  links.rank.network.refuses_ = false;
  EXPECT_EQ(links.linking.answer(2), 0u);
  links.comes(2, kTicket + 2, "the next", kTicket + 2);
  EXPECT_EQ(links.linking.answer(2), kTicket + 2);
}

TEST(Linking, AProcessKnocksAtAllWhoseCardsItFinds) {
  Knocks links(kTicket);
  const std::vector<fabric::Elsewhere> cards = {
      {1, bytes_of("of its own domain")}, {2, bytes_of("two")}, {3, bytes_of("a lost one")}};
  links.linking.knock(cards);
  EXPECT_TRUE(links.links(1, "", 0));
  EXPECT_TRUE(links.links(2, "two", kTicket));
  EXPECT_TRUE(links.links(3, "a lost one", kTicket));
  links.linking.knock(cards);
  EXPECT_TRUE(links.links(2, "", kTicket)) << "once";
  links.linking.knock({{{3, bytes_of("three")}}});
  EXPECT_TRUE(links.links(3, "three", kTicket)) << "the one that has its place now";
  EXPECT_FALSE(links.linking.answered(2));
  links.rank.network.messages_[{2, kTicket}] = {{0, 0}, bytes_of("two, grown")};
  links.rank.network.messages_[{3, kTicket}] = {{7, kTicket + 2}, bytes_of("three")};
  EXPECT_TRUE(links.linking.answered(2) && links.linking.answered(3));
  EXPECT_EQ(links.rank.network.attached_[2], bytes_of("two, grown"));
  links.linking.begin(2, view_of(5, 0, kTicket), 0);
  links.linking.begin(3, view_of(5, 0, kTicket), 0);
  links.tells_memory(2, kTicket + 4, "to another process");
  EXPECT_EQ(links.advance(), None());
  links.tells_memory(2, kTicket, "two, grown again");
  links.tells_memory(3, kTicket, "three");
  EXPECT_EQ(links.advance(), (std::vector<int>{2, 3}));
  EXPECT_EQ(links.rank.network.attached_[2], bytes_of("two, grown again"));
  EXPECT_TRUE(links.links(2, "", kTicket)) << "as they are";
  EXPECT_EQ(links.linking.joined_at(3), 7u);
}

/// A rank that a rank of this domain has told of this process links it in the epoch.
TEST(Linking, WhoKnocksLeavesItToTheOther) {
  Knocks links(kTicket);
  links.linking.knock({{{2, bytes_of("two")}}});
  EXPECT_TRUE(links.links(2, "two", kTicket));
  links.linking.begin(2, view_of(5, 0, kTicket), 0);
  EXPECT_EQ(links.advance(), None());
  links.rank.network.messages_[{2, 5}] = {{0, 0}, bytes_of("two")};
  EXPECT_EQ(links.advance(), std::vector<int>{2});
  EXPECT_TRUE(links.links(2, "two", 5));
}

TEST(Linking, OfTwoThatKnockAtEachOtherTheLowerSeatsTicketCounts) {
  Knocks links(kTicket);  // seat 0
  links.linking.knock({{{2, bytes_of("two")}}});
  EXPECT_TRUE(links.links(2, "two", kTicket));
  links.comes(2, kTicket + 2, "two", kTicket + 2);
  Member::View both = view_of(5, 0, kTicket);
  both.joins[1] = {2, kTicket + 2};
  links.linking.begin(2, both, kTicket + 2);
  EXPECT_EQ(links.advance(), None());
  EXPECT_TRUE(links.links(2, "", kTicket)) << "not under its ticket";
  links.rank.network.messages_[{2, kTicket}] = {{Channel::kJoining, kTicket + 2}, bytes_of("two")};
  links.tells_memory(2, kTicket, "two");
  EXPECT_EQ(links.advance(), std::vector<int>{2});
}

TEST(Linking, APlaceProvesThatTheFormerHolderHasEnded) {
  const fabric::Place there{"boot", "processes", "10.0.0.1"};
  const auto proves = [&](const fabric::Place& now) { return fabric::proves_end(there, now); };
  EXPECT_TRUE(proves(there));
  EXPECT_TRUE(proves({"boot", "processes", "10.0.0.9"}));
  EXPECT_FALSE(proves({"boot", "a container's", "10.0.0.1"}));
  EXPECT_TRUE(proves({"the next boot", "processes", "10.0.0.1"}));
  EXPECT_FALSE(proves({"another machine", "processes", "10.0.0.2"}));
  EXPECT_FALSE(proves({"", "processes", "10.0.0.1"}));
  EXPECT_FALSE(fabric::proves_end({"boot", "processes", ""}, {"another", "processes", ""}));

  Rank rank;
  rank.network.places_[2] = there;
  Linking linking(rank.network, rank.carrier, rank.channel, 0);
  EXPECT_FALSE(linking.proves_end(2)) << "nobody has knocked";
  EXPECT_FALSE(linking.proves_end(2, bytes_of("another machine")));
  EXPECT_TRUE(linking.proves_end(2, bytes_of("boot")));
  rank.network.refuses_ = true;
  EXPECT_FALSE(linking.proves_end(2, bytes_of("boot")));
}

TEST(Linking, WhoeverHasLeftTheViewIsNotLinked) {
  Links links;
  links.linking.begin(2, view_of(5, 2, kTicket), kTicket);
  links.waits(kTicket, "its own");
  links.live.remove(2);
  links.rank.network.messages_[{2, 5}] = {{Channel::kJoining, kTicket}, bytes_of("its own")};
  EXPECT_EQ(links.advance(), None());
  EXPECT_TRUE(links.rank.network.linked_.empty());
  // The next one takes the seat in a later epoch: nothing counts of the one before.
  links.linking.begin(2, view_of(7, 2, kTicket + 1), kTicket + 1);
  links.live.add(2);
  EXPECT_EQ(links.advance(), None());
  EXPECT_TRUE(links.rank.network.linked_.empty());
  links.rank.network.messages_[{2, 7}] = {{Channel::kJoining, kTicket + 1}, bytes_of("the next")};
  EXPECT_EQ(links.advance(), std::vector<int>{2});
  EXPECT_EQ(links.rank.network.linked_[2], bytes_of("the next"));
}

}  // namespace
}  // namespace ferry::engine::test
