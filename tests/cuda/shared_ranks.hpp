// Ranks as processes or threads that meet in shared memory, for tests with GPUs. The test's own
// process never calls CUDA: a process that has cannot fork ranks that do.
#pragma once
#include <ferry/bootstrap.hpp>
#include <functional>
#include <string>
#include <vector>

namespace ferry::test {

/// What a rank does; throws to fail. `bootstrap` also serves as a barrier.
using RankBody = std::function<void(Bootstrap& bootstrap)>;

/// Runs `ranks` ranks, `threads` of them in each process. What went wrong, one line a rank; empty
/// if all went well. A process that has not ended after `seconds` is killed; of one that a signal
/// of an error ended stderr has where it was.
std::vector<std::string> run_ranks(int ranks, int threads, const RankBody& body, int seconds = 60);

/// The GPUs that CUDA sees; 0 without a driver. Asked in a child.
int gpu_count();

}  // namespace ferry::test
