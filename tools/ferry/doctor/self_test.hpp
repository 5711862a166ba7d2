// A small exchange, checked: does Ferry work here?
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace ferry::cli {

struct SelfTest {
  std::string name{};    ///< "2 ranks as processes", ...
  std::string fabric{};  ///< that it ran on
  double seconds = 0;
  std::string failure{};  ///< "" when it passed
};

/// Two ranks as processes, then as threads: plan, dispatch, combine of a few rows, every value
/// checked; with `gpus`, the same by the CUDA engine, rank r on GPU r mod `gpus`. At most 20 s
/// each, with GPUs 60 s. To be called before any thread exists (it forks).
std::vector<SelfTest> run_self_tests(int gpus);

/// Memory of a GPU for `values`, until the last copy is dropped, and back. Throws
/// std::runtime_error. In a build without the CUDA engine there is none.
std::shared_ptr<void> on_gpu(const void* values, std::size_t bytes, int gpu);
void from_gpu(void* to, const void* from, std::size_t bytes, int gpu);

}  // namespace ferry::cli
