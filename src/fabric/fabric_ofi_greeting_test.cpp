// What ranks tell each other before they use a network: who cannot reach whom.
#include "fabric/ofi/greeting.hpp"

#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

TEST(OfiGreetings, RanksThatCannotReachEachOtherAreRefused) {
  const auto rank_at = [](const char* boot_id, const char* address, std::size_t name_bytes) {
    ofi::Greeting greeting;
    greeting.provider = "net";
    greeting.boot_id = boot_id;
    greeting.address = address;
    greeting.networks = {"10.0.0.0/24"};
    greeting.names = {Bytes(name_bytes)};
    return greeting;
  };
  const auto here = rank_at("a", "10.0.0.1", 16);
  const auto there = rank_at("b", "10.0.0.2", 16);
  for (int rank = 0; rank < 3; ++rank) {  // all say the same
    EXPECT_NO_THROW(ofi::check_greetings({here, here, there}, rank));
    expect_error(ErrorKind::invalid_argument, {"rank 1 listens at 127.0.0.1", "FERRY_HOST"},
                 [&] { ofi::check_greetings({here, rank_at("a", "127.0.0.1", 16), there}, rank); });
    for (const std::size_t bytes : {0u, 28u}) {
      expect_error(ErrorKind::mismatch, {"rank 2", "IPv6"},
                   [&] { ofi::check_greetings({here, there, rank_at("a", "::2", bytes)}, rank); });
    }
    expect_error(ErrorKind::mismatch, {"rank 0", "of 0 bytes"},
                 [&] { ofi::check_greetings({rank_at("a", "10.0.0.1", 0), there}, rank); });
  }
}

}  // namespace
}  // namespace ferry::fabric::test
