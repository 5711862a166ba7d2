#include "network_figures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace ferry::bench {

double Figure::median_us() const {
  std::vector<double> sorted = us;
  std::sort(sorted.begin(), sorted.end());
  return sorted.empty() ? 0 : sorted[sorted.size() / 2];
}

double Figure::best_us() const {
  return us.empty() ? 0 : *std::min_element(us.begin(), us.end());
}

namespace {

template <class Time>
double ratio(const Figure& figure, const std::vector<Figure>& all, const Time& time) {
  double best = std::numeric_limits<double>::infinity();
  for (const Figure& other : all) {
    if (other.raw && other.group == figure.group) best = std::min(best, time(other));
  }
  return figure.latency ? time(figure) / best : best / time(figure);
}

std::string shown(const Figure& figure, double ratio) {
  return figure.latency ? fmt::format("{:.2f} x", ratio) : fmt::format("{:.0f} %", 100 * ratio);
}

}  // namespace

double against_raw(const Figure& figure, const std::vector<Figure>& all) {
  return ratio(figure, all, [](const Figure& f) { return f.median_us(); });
}

double best_against_raw(const Figure& figure, const std::vector<Figure>& all) {
  return ratio(figure, all, [](const Figure& f) { return f.best_us(); });
}

std::string table(const std::vector<Figure>& figures) {
  std::string text = fmt::format("{:<32} {:>10} {:>10} {:>8} {:>9} {:>10} {:>9}\n", "", "bytes",
                                 "median us", "GB/s", "of raw", "best us", "of raw");
  for (const Figure& f : figures) {
    text += fmt::format("{:<32} {:>10} {:>10.1f} {:>8.2f} {:>9} {:>10.1f} {:>9}\n", f.name, f.bytes,
                        f.median_us(), f.gb_per_s(), shown(f, against_raw(f, figures)), f.best_us(),
                        shown(f, best_against_raw(f, figures)));
  }
  return text;
}

nlohmann::json to_json(const std::vector<Figure>& figures) {
  nlohmann::json all = nlohmann::json::array();
  for (const Figure& f : figures) {
    all.push_back(
        {{"name", f.name},
         {"bytes", f.bytes},
         {"median_us", f.median_us()},
         {"best_us", f.best_us()},
         {"gb_per_s", f.gb_per_s()},
         {f.latency ? "times_raw" : "share_of_raw", against_raw(f, figures)},
         {f.latency ? "best_times_raw" : "best_share_of_raw", best_against_raw(f, figures)},
         {"us", f.us}});
  }
  return all;
}

}  // namespace ferry::bench
