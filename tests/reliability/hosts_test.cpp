// Several hosts, as Ferry sees them: ranks with another boot id. Those of one share memory, a
// network joins them, and nobody has to say so.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "engine/test_network.hpp"
#include "platform/posix/test_address.hpp"
#include "platform/posix/test_rights.hpp"
#include "platform/process.hpp"
#include "processes.hpp"

namespace ferry::test {
namespace {

/// From now on this process is on another host, as far as its boot id says. False: not allowed.
bool move_to_host(int host) {
  const std::string file =
      (std::filesystem::temp_directory_path() / ("ferry-boot-" + std::to_string(process_id())))
          .string();
  std::ofstream(file) << "0b5e3f6a-0000-4000-8000-00000000000" << host << "\n";
  const bool moved = own_mounts() && mount_over(file, "/proc/sys/kernel/random/boot_id");
  std::filesystem::remove(file);
  return moved;
}

/// Exchanges over hosts; says what joined the ranks, or why it could not be tried.
std::string exchange(int rank, std::shared_ptr<Bootstrap> bootstrap, int host) {
  if (!move_to_host(host)) return "skip: no mount namespaces here";
  GroupConfig config{.experts = 10, .deadline = std::chrono::seconds(20)};
  config.crossing = Crossing::hierarchical;
  config.ofi.host = outer_address();
  try {
    Group group(std::move(bootstrap), config);
    constexpr std::int64_t kRows = 150, kColumns = 32;
    std::vector<std::int64_t> ids;
    for (std::int64_t i = 0; i < kRows * 4; ++i) ids.push_back((i / 4 + i % 4 * 2) % 10);
    std::vector<float> x(kRows * kColumns);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 97) + rank;
    const Plan plan = group.plan({ids.data(), Dtype::i64, {kRows, 4}});
    for (int round = 0; round < 3; ++round) {
      const Received got = group.dispatch({x.data(), Dtype::f32, {kRows, kColumns}}, plan);
      const Combined back = group.combine(got.x, plan);
      for (std::size_t i = 0; i < x.size(); ++i) {
        const std::int64_t token = static_cast<std::int64_t>(i) / kColumns;
        std::vector<bool> to(5);  // two experts a rank
        for (int k = 0; k < 4; ++k) to[static_cast<std::size_t>(ids[token * 4 + k] / 2)] = true;
        const auto ranks = static_cast<float>(std::count(to.begin(), to.end(), true));
        if (back.x.as<float>()[i] != ranks * x[i]) return "wrong sum";
      }
    }
    group.barrier();
    return group.fabric_name() + ", " + std::to_string(group.domains()) + " domains, this one " +
           std::to_string(group.domain_of(rank));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::unsupported) return std::string("skip: ") + error.what();
    return error.what();
  }
}

/// `hosts`: of each rank.
void run(const std::vector<int>& hosts, const std::vector<std::string>& expected) {
  if (outer_address().empty()) GTEST_SKIP() << "no address but loopback";
  if (!engine::test::has_network()) GTEST_SKIP() << "no libfabric on this machine";
  Ranks ranks(static_cast<int>(hosts.size()), [&](int rank, std::shared_ptr<Bootstrap> bootstrap,
                                                  const Reporter& reporter) {
    reporter.line(exchange(rank, std::move(bootstrap), hosts[static_cast<std::size_t>(rank)]));
  });
  std::vector<std::string> lines;
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    lines.push_back(ranks.line(static_cast<int>(r), 40));
  }
  if (lines[0].starts_with("skip: ")) GTEST_SKIP() << lines[0];
  EXPECT_EQ(lines, expected);
  for (std::size_t r = 0; r < hosts.size(); ++r) EXPECT_EQ(ranks.join(static_cast<int>(r), 10), 0);
  EXPECT_EQ(shared_memory_names(), std::vector<std::string>{});
}

TEST(Hosts, AreDomainsUnevenAndInAnyOrder) {
  run({0, 1, 0, 2, 1}, {"shm+ofi, 3 domains, this one 0", "shm+ofi, 3 domains, this one 1",
                        "shm+ofi, 3 domains, this one 0", "shm+ofi, 3 domains, this one 2",
                        "shm+ofi, 3 domains, this one 1"});
}

}  // namespace
}  // namespace ferry::test
