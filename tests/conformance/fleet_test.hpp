// For GoogleTest: fabrics as a parameter, fleets whose failures fail the test.
#pragma once
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>

#include "domain_cases.hpp"
#include "fleet.hpp"
#include "random.hpp"

namespace ferry::conformance {

inline std::string name_of_wires(const Wires& wires) {
  if (wires.domain_size > 0) return "Domains";
  return wires.fabric == FabricKind::local ? "Local"
         : wires.fabric == FabricKind::shm ? "Shm"
                                           : "Sim";
}

/// Tests that hold on every fabric.
class OnFabric : public ::testing::TestWithParam<Wires> {
 protected:
  void SetUp() override {
    if (GetParam().fabric == FabricKind::shm && only_threads()) {
      GTEST_SKIP() << "the thread sanitizer watches threads of one process only";
    }
    std::printf("FERRY_TEST_SEED=%llu\n", static_cast<unsigned long long>(base_seed()));
  }
  static void run(int ranks, const std::function<void(Rank&)>& body) {
    const auto failures = run_fleet({GetParam(), ranks}, body);
    EXPECT_TRUE(failures.empty()) << joined(failures);
  }
};

/// The same for ranks in domains.
inline void run_on(const DomainCell& cell, const std::function<void(Rank&)>& body) {
  const auto failures = run_fleet({cell.wires, cell.ranks}, body);
  EXPECT_TRUE(failures.empty()) << to_string(cell) << "\nFERRY_TEST_SEED=" << base_seed() << "\n"
                                << joined(failures);
}

#define FERRY_ON_EVERY_FABRIC(suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(                                                                        \
      Fabrics, suite,                                                                              \
      ::testing::Values(Wires(FabricKind::local), Wires(FabricKind::shm), Wires(FabricKind::sim)), \
      [](const auto& test) { return name_of_wires(test.param); })

/// The same and over domains of two ranks.
#define FERRY_ON_EVERY_FABRIC_AND_DOMAINS(suite)                                               \
  FERRY_ON_EVERY_FABRIC(suite);                                                                \
  INSTANTIATE_TEST_SUITE_P(                                                                    \
      Domains, suite,                                                                          \
      ::testing::Values(Wires(FabricKind::local, 2, FabricKind::sim, Crossing::hierarchical)), \
      [](const auto& test) { return name_of_wires(test.param); })

/// Runs `call`, which must throw a ferry::Error of this kind; returns its text.
inline std::string expect_error(Rank& rank, ErrorKind kind, const char* what,
                                const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    rank.check(error.kind() == kind, std::string(what) + ": expected an error of kind " +
                                         name_of(kind) + ", got " + name_of(error.kind()) + ": " +
                                         error.what());
    return error.what();
  }
  rank.fail(std::string(what) + ": expected an error of kind " + name_of(kind) + ", got none");
  return {};
}

inline void expect_text(Rank& rank, const std::string& text, const std::string& part) {
  rank.check(text.find(part) != std::string::npos,
             "expected \"" + part + "\" in the error: " + text);
}

}  // namespace ferry::conformance
