// What network_speed measured, for people and for programs.
#pragma once
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ferry::bench {

/// One way of moving the same bytes.
struct Figure {
  std::string name{};
  std::string group{};       ///< figures of one group move the same bytes
  bool raw = false;          ///< without Ferry
  bool latency = false;      ///< what counts is time, not bytes a second
  std::size_t bytes = 0;     ///< that each rank sends to the other, rows alone
  std::vector<double> us{};  ///< of every round, the slower rank
  double median_us() const;
  double best_us() const;
  double gb_per_s() const { return static_cast<double>(bytes) / median_us() / 1e3; }
};

/// Of the same group's best raw figure: bytes a second as a share, or how many times as long.
double against_raw(const Figure& figure, const std::vector<Figure>& all);
/// The same of the best rounds: what remains where others use the machine, too.
double best_against_raw(const Figure& figure, const std::vector<Figure>& all);

std::string table(const std::vector<Figure>& figures);
nlohmann::json to_json(const std::vector<Figure>& figures);

}  // namespace ferry::bench
