// What ranks tell each other before they use a network: who cannot reach whom.
#include "fabric/ofi/handshake.hpp"

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

}  // namespace
}  // namespace ferry::fabric::test
