// What ranks tell each other before they use a network: who cannot reach whom.
#include "fabric/ofi/handshake.hpp"

#include "fabric/ofi/card.hpp"
#include "fabric/segment_table.hpp"
#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

TEST(OfiHandshakes, RanksThatCannotReachEachOtherAreRefused) {
  const auto rank_at = [](const char* boot_id, const char* address, std::size_t name_bytes) {
    ofi::Handshake handshake;
    handshake.provider = "net";
    handshake.boot_id = boot_id;
    handshake.address = address;
    handshake.networks = {"10.0.0.0/24"};
    handshake.names = {Bytes(name_bytes)};
    return handshake;
  };
  const auto here = rank_at("a", "10.0.0.1", 16);
  const auto there = rank_at("b", "10.0.0.2", 16);
  for (int rank = 0; rank < 3; ++rank) {  // all say the same
    EXPECT_NO_THROW(ofi::check_handshakes({here, here, there}, rank));
    expect_error(ErrorKind::invalid_argument, {"rank 1 listens at 127.0.0.1", "FERRY_HOST"}, [&] {
      ofi::check_handshakes({here, rank_at("a", "127.0.0.1", 16), there}, rank);
    });
    for (const std::size_t bytes : {0u, 28u}) {
      expect_error(ErrorKind::mismatch, {"rank 2", "IPv6"},
                   [&] { ofi::check_handshakes({here, there, rank_at("a", "::2", bytes)}, rank); });
    }
    expect_error(ErrorKind::mismatch, {"rank 0", "of 0 bytes"},
                 [&] { ofi::check_handshakes({rank_at("a", "10.0.0.1", 0), there}, rank); });
  }
}

ofi::Handshake handshake_of(std::size_t nics, std::size_t endpoints) {
  ofi::Handshake handshake;
  handshake.provider = "net";
  handshake.boot_id = "a";
  handshake.address = "10.0.0.1";
  for (std::size_t nic = 0; nic < nics; ++nic) handshake.networks.push_back(std::to_string(nic));
  handshake.names.assign(nics * endpoints, Bytes(16, std::byte{1}));
  return handshake;
}

TEST(OfiHandshakes, RanksMayHaveDifferentNumbersOfNicsButNotOfEndpointsOnEach) {
  const auto one = handshake_of(1, 2), three = handshake_of(3, 2);
  EXPECT_NO_THROW(ofi::check_handshakes({one, three}, 0));
  expect_error(ErrorKind::mismatch, {"rank 1 has 1 endpoints on each NIC, rank 0 2"},
               [&] { ofi::check_handshakes({one, handshake_of(2, 1)}, 0); });
}

TEST(OfiHandshakes, WhatCannotBeIsRefused) {
  const auto refused = [](const Bytes& bytes) {
    expect_error(ErrorKind::mismatch, {"rank 0: what rank 3 says", "cannot be read"},
                 [&] { ofi::handshake_from(bytes, 0, 3); });
    expect_error(ErrorKind::mismatch, {"rank 0: what rank 3 says", "cannot be read"},
                 [&] { ofi::offer_from(bytes, 0, 3); });
  };
  const Bytes handshake = to_bytes(handshake_of(2, 3));
  EXPECT_EQ(ofi::handshake_from(handshake, 0, 3).names.size(), 6u);
  const ofi::Offer given{.key = {1, 2}, .boot_id = "a", .nearest = {"eth0 10.0.0.1", "eth1 "}};
  const Bytes offer = to_bytes(given);
  EXPECT_EQ(ofi::offer_from(offer, 0, 3).nearest, given.nearest);
  EXPECT_EQ(ofi::offer_from(offer, 0, 3).key, given.key);
  for (const Bytes& whole : {handshake, offer}) {
    for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
      refused({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(bytes)});
    }
    Bytes longer = whole;
    longer.push_back({});
    refused(longer);
  }
  ofi::Handshake uneven = handshake_of(2, 2);
  uneven.names.pop_back();
  refused(to_bytes(uneven));
  refused(to_bytes(handshake_of(3, 3)));  // nine endpoints
  refused(to_bytes(handshake_of(0, 0)));  // neither NICs nor a problem
  ofi::Handshake problem;
  problem.problem = "no NIC";
  EXPECT_EQ(ofi::handshake_from(to_bytes(problem), 0, 3).problem, "no NIC");
}

void expect_unreadable(int peer, const std::function<void()>& read) {
  expect_error(ErrorKind::mismatch,
               {"rank 0: what rank " + std::to_string(peer) + " says", "cannot be read"}, read);
}

/// Cut at every place, and with a byte too many.
void expect_whole_alone(const Bytes& whole, int peer,
                        const std::function<void(const Bytes&)>& read) {
  EXPECT_NO_THROW(read(whole));
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const auto end = whole.begin() + static_cast<std::ptrdiff_t>(bytes);
    expect_unreadable(peer, [&] { read({whole.begin(), end}); });
  }
  Bytes longer = whole;
  longer.push_back({});
  expect_unreadable(peer, [&] { read(longer); });
}

TEST(OfiCards, InvitationsThatCannotBeAreRefused) {
  const ofi::Invitation given{.key = {3, 4}, .address = "10.0.0.1", .local = 8};
  const Bytes whole = to_bytes(given);
  const auto read = [](const Bytes& bytes) { ofi::invitation_from(bytes, 0); };
  expect_whole_alone(whole, 0, read);
  const ofi::Invitation got = ofi::invitation_from(whole, 0);
  EXPECT_EQ(got.key, given.key);
  EXPECT_EQ(got.address, given.address);
  EXPECT_EQ(got.local, given.local);
  Bytes other_magic = whole;
  other_magic[0] ^= std::byte{1};
  expect_unreadable(0, [&] { read(other_magic); });
  for (const int local : {0, -1, 1 << 16}) {
    expect_unreadable(0, [&] { read(to_bytes(ofi::Invitation{given.key, given.address, local})); });
  }
}

TEST(OfiCards, CardsThatCannotBeAreRefused) {
  ofi::Card given{handshake_of(2, 1), {{0, 4096, Bytes(40)}, {1, 8192, Bytes(kMaxHandleBytes)}}};
  const auto read = [](const Bytes& bytes) { ofi::card_from(bytes, 0, 3); };
  expect_whole_alone(to_bytes(given), 3, read);
  const ofi::Card got = ofi::card_from(to_bytes(given), 0, 3);
  EXPECT_EQ(got.handshake.names, given.handshake.names);
  ASSERT_EQ(got.segments.size(), 2u);
  EXPECT_EQ(got.segments[1].bytes, 8192u);
  EXPECT_EQ(got.segments[1].handle.size(), kMaxHandleBytes);
  given.segments[1].handle.push_back({});
  expect_unreadable(3, [&] { read(to_bytes(given)); });
  given.segments.assign(kMaxSegments + 1, {0, 4096, {}});
  expect_unreadable(3, [&] { read(to_bytes(given)); });
  // The handshake's own bytes are cut, and all counts around it are right.
  const Bytes handshake = to_bytes(handshake_of(1, 1));
  const auto cut = static_cast<std::uint32_t>(handshake.size() - 1);
  Bytes bytes(sizeof cut);
  std::memcpy(bytes.data(), &cut, sizeof cut);
  bytes.insert(bytes.end(), handshake.begin(), handshake.end() - 1);
  bytes.resize(bytes.size() + sizeof(std::uint32_t));  // no segments
  expect_unreadable(3, [&] { read(bytes); });
}

TEST(OfiCards, OneThatCannotBeReachedIsRefused) {
  const ofi::Handshake mine = handshake_of(2, 2);
  EXPECT_NO_THROW(ofi::check_joined(mine, 0, handshake_of(1, 2), 3));
  ofi::Handshake provider = mine, problem = mine, names = mine;
  provider.provider = "verbs";
  problem.problem = "no NIC";
  for (auto& name : names.names) name.resize(28);
  ofi::Handshake nothing;  // such a card can be read
  nothing.problem = "no NIC";
  for (const auto& bad : {provider, problem, names, nothing, handshake_of(2, 1)}) {
    expect_error(ErrorKind::mismatch, {"rank 0 and rank 3", "cannot reach each other"},
                 [&] { ofi::check_joined(mine, 0, bad, 3); });
  }
}

}  // namespace
}  // namespace ferry::fabric::test
