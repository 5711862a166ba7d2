// A rank under a limit of its shell (ulimit -v, -f, -n): whatever is too little, it ends in order,
// and its error says which limit that was.
#include <gtest/gtest.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/membership/arbiter.hpp"
#include "platform/limits.hpp"
#include "platform/posix/test_limits.hpp"
#include "platform/process.hpp"
#include "platform/test_child.hpp"
#include "processes.hpp"

namespace ferry::test {
namespace {

using namespace std::chrono_literals;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
constexpr std::size_t kMemory = std::size_t{16} << 20;

/// How a child ended: "good", the kind and words of its error, or nothing.
struct End {
  std::string said{};
  Child::End how{};
  bool good() const { return how.good() && said == "good"; }
};

/// Runs `body` in a child that has the limit, with so much of its stack in use already that no more
/// of it is needed.
End under(Limit which, std::uint64_t limit, const std::function<void()>& body) {
  Lines lines;
  Child child([&] {
    std::array<volatile char, 256 << 10> stack;
    for (std::size_t i = 0; i < stack.size(); i += 4096) stack[i] = 1;
    if (!set_limit(which, limit)) return 9;
    std::string said = "good";
    try {
      body();
    } catch (const Error& error) {
      said = std::string(name_of(error.kind())) + ": " + error.what();
    } catch (const std::exception& error) {
      said = std::string("not an error of Ferry's: ") + error.what();
    }
    lines.say(said);
    return 0;
  });
  lines.listen();
  const std::string said = lines.next(60s);
  return {said, child.wait()};
}

std::string describe(const End& end) {
  if (end.how.killed) return "killed by signal " + std::to_string(end.how.code);
  return end.said + " (exit code " + std::to_string(end.how.code) + ")";
}

/// Creates a group and exchanges rows in it.
void exchange(std::shared_ptr<Bootstrap> bootstrap, FabricKind fabric) {
  GroupConfig config;
  config.experts = bootstrap->size();
  config.fabric = fabric;
  config.memory_bytes = kMemory;
  config.deadline = 20s;
  config.ofi.provider = fabric == FabricKind::ofi ? "tcp" : "";
  Group group(std::move(bootstrap), config);
  const std::vector<float> rows(256 * 64, 1.0F);
  const std::vector<std::int64_t> routes(256, 0);
  const ConstTensorView x(rows.data(), Dtype::f32, {256, 64});
  const Received received = group.dispatch(x, {routes.data(), Dtype::i64, {256, 1}});
  group.combine(received.x, received.plan);
  LatencyExchange(group, {.capacity = 64, .hidden = 256, .topk = 1});
}

std::function<void()> alone(FabricKind fabric) {
  return [fabric, port = free_port()] {
    TcpOptions options;
    options.port = port;
    options.secret = "limits";
    options.deadline = 20s;
    exchange(tcp_bootstrap(options), fabric);
  };
}

/// A rank alone under a limit; again where somebody else has just taken its port.
End alone_under(Limit which, std::uint64_t limit, FabricKind fabric) {
  End end;
  for (int attempt = 0; attempt < 3; ++attempt) {
    end = under(which, limit, alone(fabric));
    if (end.said.find("another program has that port") == std::string::npos) break;
  }
  return end;
}

void expect_words(const End& end, const std::string& option, const std::string& what) {
  if (end.good()) return;
  EXPECT_TRUE(end.how.good()) << what << ": " << describe(end);
  EXPECT_TRUE(end.said.starts_with("exhausted: ")) << what << ": " << describe(end);
  EXPECT_NE(end.said.find("ulimit -" + option), std::string::npos) << what << ": " << describe(end);
}

/// From nothing more than there is to what is enough.
void sweep_address_space(FabricKind fabric) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer lives under the same limit";
  const std::uint64_t base = address_space_taken();
  bool some = false, enough = false;
  for (std::uint64_t more = 512 << 10; more < std::uint64_t{1} << 30; more += more / 2) {
    const End end = alone_under(Limit::address_space, base + more, fabric);
    expect_words(end, "v", std::to_string(more) + " bytes more");
    some = some || !end.good();
    enough = end.good();
    if (enough && more > 8 * kMemory) break;
  }
  EXPECT_TRUE(some);
  EXPECT_TRUE(enough);
}

TEST(Limits, OfAddressSpaceInOneProcess) {
  sweep_address_space(FabricKind::local);
}

TEST(Limits, OfAddressSpaceWithSharedMemory) {
  sweep_address_space(FabricKind::shm);
}

void sweep_files(FabricKind fabric, std::uint64_t step = 1) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer lives under the same limit";
  const auto base = static_cast<std::uint64_t>(next_descriptor());
  int few = 0;
  bool enough = false;
  for (std::uint64_t more = 0; more < 64 && !enough; more += step) {
    const End end = alone_under(Limit::open_files, base + more, fabric);
    expect_words(end, "n", std::to_string(more) + " files more");
    enough = end.good();
    few += enough ? 0 : 1;
  }
  EXPECT_GT(few, 2);
  EXPECT_TRUE(enough);
}

TEST(Limits, OfFilesInOneProcess) {
  sweep_files(FabricKind::local);
}

TEST(Limits, OfFilesWithSharedMemory) {
  sweep_files(FabricKind::shm);
}

TEST(Limits, OfFilesWithANetwork) {
  if (!alone_under(Limit::open_files, 256, FabricKind::ofi).good()) GTEST_SKIP() << "no libfabric";
  sweep_files(FabricKind::ofi, 3);
}

// The kernel would end the process by SIGXFSZ.
TEST(Limits, OfTheSizeOfFiles) {
  const End end = alone_under(Limit::file_size, kMemory / 2, FabricKind::shm);
  EXPECT_TRUE(end.how.good()) << describe(end);
  for (const char* word :
       {"exhausted: ", "in /dev/shm: files of this process may have 8388608 bytes", "ulimit -f",
        "needs 16777216"}) {
    EXPECT_NE(end.said.find(word), std::string::npos) << describe(end);
  }
  EXPECT_TRUE(shared_memory_names().empty());
}

// As on a full disk: the next attempt finds no file that holds nothing.
TEST(Limits, AnArbitersFileThatCouldNotBeWrittenIsRemoved) {
  const engine::ArbiterFile arbiter(testing::TempDir(),
                                    {7, static_cast<std::uint64_t>(process_id())}, 0, 1);
  const End end = under(Limit::file_size, 8, [&] {
    std::signal(SIGXFSZ, SIG_IGN);
    arbiter.create();
  });
  EXPECT_NE(end.said.find("could not be written"), std::string::npos) << describe(end);
  arbiter.create();
  arbiter.leave(engine::Member::Seats::first(1));
}

// One of two ranks: the other one hears at once, and in words.
TEST(Limits, OfOneRankAreToldToTheOthers) {
  Ranks ranks(2, [](int rank, std::shared_ptr<Bootstrap> bootstrap, const Reporter& report) {
    if (rank == 1) set_limit(Limit::file_size, kMemory / 2);
    try {
      exchange(std::move(bootstrap), FabricKind::shm);
    } catch (const Error& error) {
      report.line(std::string(name_of(error.kind())) + ": " + error.what());
    }
  });
  const std::string first = ranks.line(0, 30), second = ranks.line(1, 30);
  EXPECT_TRUE(first.starts_with("peer failed: ")) << first;
  EXPECT_NE(first.find("rank 1 could not go on: rank 1 cannot register 16777216 bytes"),
            std::string::npos)
      << first;
  EXPECT_NE(first.find("ulimit -f"), std::string::npos) << first;
  EXPECT_TRUE(second.starts_with("exhausted: ")) << second;
}

}  // namespace
}  // namespace ferry::test
