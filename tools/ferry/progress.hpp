// How far a command is, for those who wait for it.
#pragma once
#include <chrono>
#include <string>
#include <string_view>

namespace ferry::cli {

/// On stderr: on a terminal a bar, which goes at the end; elsewhere a line each `interval`, also
/// while nothing gets done.
class Progress {
 public:
  /// `name`: of the command. `total`: steps that there are.
  Progress(std::string name, int total, std::chrono::milliseconds interval = kInterval);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `now`: what is being done.
  void show(int done, std::string_view now);

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kInterval{2000};
  std::string name_;
  std::chrono::milliseconds interval_;
  bool terminal_;
  int total_;
  int done_ = -1;                          ///< nothing is shown yet
  Clock::time_point last_ = Clock::now();  ///< of the last line
};

}  // namespace ferry::cli
