// A small exchange, checked: does Ferry work here?
#pragma once
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
/// checked. At most 20 s each. To be called before any thread exists (it forks).
std::vector<SelfTest> run_self_tests();

}  // namespace ferry::cli
