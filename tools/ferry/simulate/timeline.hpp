// When the links of each rank were busy, as JSON that ui.perfetto.dev shows.
#pragma once
#include <map>
#include <string>
#include <utility>

namespace ferry::cli {

class Timeline {
 public:
  /// `link` of a rank was busy from `begin` for so long, at least.
  void add(int rank, const std::string& link, double begin_s, double seconds);
  void write(const std::string& file) const;

 private:
  /// By rank and link: how long, by begin.
  std::map<std::pair<int, std::string>, std::map<double, double>> spans_{};
};

}  // namespace ferry::cli
