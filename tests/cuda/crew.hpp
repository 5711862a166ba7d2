// Ranks that outlive a test: making a CUDA context takes seconds, so what can run in processes that
// have one already does.
#pragma once
#include <string>
#include <vector>

#include "shared_ranks.hpp"

namespace ferry::test {

/// As run_ranks, on processes that stay for later tests; only in the body of a gtest test. In them
/// the whole test runs once more, and `body` is called where the test calls this. What ends or
/// kills a process needs run_ranks. After a problem the next call starts new ones.
std::vector<std::string> run_on_crew(int ranks, int threads, const RankBody& body,
                                     int seconds = 60);

}  // namespace ferry::test
