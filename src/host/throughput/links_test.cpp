// What the ways between ranks carry, as every rank is told alike.

#include "engine/test_groups.hpp"

namespace ferry::host::test {

using namespace engine::test;
namespace {

/// Every rank's answer.
std::vector<Links> measure(const GroupConfig& config, int ranks) {
  std::vector<Links> all(static_cast<std::size_t>(ranks));
  with_groups(ranks, config, [&](Group& group) {
    int steps = 0, last = 0;
    all[static_cast<std::size_t>(group.rank())] = measure_links(group, [&](int done, int total) {
      EXPECT_EQ(done, ++steps);
      last = total;
    });
    EXPECT_EQ(steps, last);
    EXPECT_EQ(steps > 0, ranks > 1);
    group.barrier();  // and the group goes on
  });
  return all;
}

void expect_sound(const std::vector<Links>& all) {
  for (const Links& links : all) {
    ASSERT_EQ(links.ranks(), static_cast<int>(all.size()));
    EXPECT_EQ(links.latency_ns, all[0].latency_ns);
    EXPECT_EQ(links.bytes_per_s, all[0].bytes_per_s);
    EXPECT_EQ(links.together_bytes_per_s, all[0].together_bytes_per_s);
    EXPECT_EQ(links.domains, all[0].domains);
  }
  const Links& links = all[0];
  ASSERT_EQ(links.together_bytes_per_s.size(), all.size());
  for (int a = 0; a < links.ranks(); ++a) {
    EXPECT_EQ(links.together_bytes_per_s[static_cast<std::size_t>(a)] > 0,
              links.domains.back() > 0);
    for (int b = 0; b < links.ranks(); ++b) {
      EXPECT_EQ(links.latency(a, b), links.latency(b, a));
      EXPECT_EQ(links.latency(a, b) > 0, a != b);
      EXPECT_EQ(links.rate(a, b) > 0, a != b);
    }
  }
}

TEST(Links, AreMeasuredAndTheSameOnAllRanks) {
  const auto all = measure({}, 3);
  expect_sound(all);
  EXPECT_EQ(all[0].domains, (std::vector<int>{0, 0, 0}));
}

TEST(Links, AcrossDomainsAreThoseOfTheNetwork) {
  // A signal over the simulated network takes up to 200 us, half of that in the middle: slower
  // than memory by far, on any machine.
  GroupConfig config;
  config.domain_size = 2;
  config.network = FabricKind::sim;
  const auto all = measure(config, 3);
  expect_sound(all);
  EXPECT_EQ(all[0].domains, (std::vector<int>{0, 0, 1}));
  EXPECT_GT(all[0].latency(0, 2), 20e3) << "of 200 round trips three quarters took longer";
}

TEST(Links, AGroupThatIsDestroyedHasNone) {
  with_groups(1, {}, [](Group& group) {
    EXPECT_EQ(measure_links(group).ranks(), 1);
    group.destroy();
    expect_error(ErrorKind::destroyed, {"measure_links"}, [&] { measure_links(group); });
  });
}

}  // namespace
}  // namespace ferry::host::test
