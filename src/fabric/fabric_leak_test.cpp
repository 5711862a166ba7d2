// Creating and destroying fabrics 200 times leaves nothing: descriptors, mappings, threads, names.
#include <filesystem>
#include <fstream>

#include "fabric/test_names.hpp"
#include "fabric/test_ranks.hpp"

namespace ferry::fabric::test {
namespace {

struct Usage {
  long descriptors;
  long mappings;
  long threads;
  long names;
};

long entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

Usage usage() {
  std::ifstream maps("/proc/self/maps");
  long lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return {entries("/proc/self/fd"), lines, entries("/proc/self/task"),
          static_cast<long>(own_names().size())};
}

class LeakTest : public ::testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Every, LeakTest,
                         ::testing::Values(Setting{"local", "local", false},
                                           Setting{"sim", "sim", false},
                                           Setting{"shm_threads", "shm", false},
                                           Setting{"shm", "shm", true}),
                         [](const auto& setting) { return std::string(setting.param.name); });

TEST_P(LeakTest, TwoHundredCyclesLeaveNothing) {
  run_ranks(GetParam(), 3, [](Rank& me) {
    const auto cycle = [&me](int i) {
      const auto fabric = me.make();
      me.connect(*fabric, 4096);
      if (i % 3 != 0) return;  // destroyed without use
      const Segment second = me.connect(*fabric, 100'000);
      const int next = (me.rank() + 1) % 3;
      fabric->publish(next, {second.id, 64}, 1, 0, 1);
      EXPECT_TRUE(await_flag(second, 64, 1));
      if (i % 2 == 0) fabric->register_memory(4096);  // never attached, never sealed
    };
    const auto measured = [&me] {  // one after the other: looking takes a descriptor
      Usage mine{};
      for (int r = 0; r < 3; ++r) {
        me.barrier();
        if (r == me.rank()) mine = usage();
      }
      me.barrier();
      return mine;
    };
    for (int i = 0; i < 10; ++i) cycle(i);  // allocators and libraries settle
    const Usage before = measured();
    for (int i = 0; i < 200; ++i) cycle(i);
    const Usage after = measured();
    EXPECT_EQ(after.descriptors, before.descriptors);
    EXPECT_EQ(after.threads, before.threads);
    EXPECT_EQ(after.names, 0);
    EXPECT_LE(after.mappings, before.mappings + 20);  // a leak would be 200 or more
  });
}

}  // namespace
}  // namespace ferry::fabric::test
