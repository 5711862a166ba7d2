#include "doctor/net.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

namespace ferry::cli {
namespace {

constexpr double kSlow = 3, kLate = 3;  // times
constexpr double kLeastLateNs = 50'000;

/// Whether a pair of ranks counts.
using Counts = std::function<bool(int, int)>;
using Ranks = std::vector<int>;

bool is_in(const Ranks& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

/// Finds what is odd among the links of one sort: inside domains, or across. Links that are
/// explained by something larger are no longer compared.
class Search {
 public:
  Search(const Links& links, bool inside) : links_(links), inside_(inside) {
    for (int rank = 0; rank < links.ranks(); ++rank) {
      const auto domain = static_cast<std::size_t>(links.domains[static_cast<std::size_t>(rank)]);
      if (domain >= domains_.size()) domains_.resize(domain + 1);
      domains_[domain].push_back(rank);
      ranks_.push_back({rank});
    }
  }

  std::vector<OddLink> run() {
    if (!inside_) {
      look_at_members(domains_);
      look_at_ways(domains_);
    }
    look_at_members(ranks_);
    look_at_ways(ranks_);
    look_at_links();
    explained_.clear();
    if (!inside_) look_for_late_members(domains_);
    look_for_late_members(ranks_);
    look_for_late_links();
    return std::move(odd_);
  }

 private:
  bool together(int a, int b) const {
    return links_.domains[static_cast<std::size_t>(a)] ==
           links_.domains[static_cast<std::size_t>(b)];
  }
  bool is_open(int from, int to) const {
    return from != to && together(from, to) == inside_ && explained_.count({from, to}) == 0;
  }
  double rate(int from, int to) const { return links_.rate(from, to); }
  double latency(int a, int b) const { return links_.latency(a, b); }

  /// Of the links that count and are not explained, ascending.
  std::vector<double> pick(bool rates, const Counts& counts) const {
    std::vector<double> picked;
    for (int from = 0; from < links_.ranks(); ++from) {
      for (int to = 0; to < links_.ranks(); ++to) {
        if (!is_open(from, to) || !counts(from, to)) continue;
        picked.push_back(rates ? rate(from, to) : latency(from, to));
      }
    }
    std::sort(picked.begin(), picked.end());
    return picked;
  }
  /// Of an even number of values the lower or the upper one in the middle. Who is suspected is
  /// given the better one, and compared with the worse one: one bad value of two proves nothing.
  static double lower(const std::vector<double>& values) {
    return values.empty() ? 0 : values[(values.size() - 1) / 2];
  }
  static double upper(const std::vector<double>& values) {
    return values.empty() ? 0 : values[values.size() / 2];
  }
  static bool is_slow(double value, double usual) { return value > 0 && value * kSlow <= usual; }
  static bool is_late(double value, double usual) {
    return usual > 0 && value >= kLate * usual && value >= usual + kLeastLateNs;
  }

  void explain(const Counts& counts) {
    for (int from = 0; from < links_.ranks(); ++from) {
      for (int to = 0; to < links_.ranks(); ++to) {
        if (is_open(from, to) && counts(from, to)) explained_.insert({from, to});
      }
    }
  }

  /// Each of the sets of ranks against the links that have nothing to do with it.
  void look_at_members(const std::vector<Ranks>& sets) {
    for (const Ranks& set : sets) {
      const Counts out = [&](int from, int to) { return is_in(set, from) && !is_in(set, to); };
      const Counts in = [&](int from, int to) { return !is_in(set, from) && is_in(set, to); };
      const double usual =
          lower(pick(true, [&](int from, int to) { return !is_in(set, from) && !is_in(set, to); }));
      const double sent = upper(pick(true, out)), received = upper(pick(true, in));
      const bool sends = is_slow(sent, usual), receives = is_slow(received, usual);
      if (sends && receives) {
        odd_.push_back({OddLink::Kind::both, set, {}, std::min(sent, received), usual});
      } else if (sends) {
        odd_.push_back({OddLink::Kind::sends, set, {}, sent, usual});
      } else if (receives) {
        odd_.push_back({OddLink::Kind::receives, {}, set, received, usual});
      }
      if (sends) explain(out);
      if (receives) explain(in);
    }
  }

  /// One way between two sets against the way back.
  void look_at_ways(const std::vector<Ranks>& sets) {
    for (const Ranks& a : sets) {
      for (const Ranks& b : sets) {
        const Counts there = [&](int from, int to) { return is_in(a, from) && is_in(b, to); };
        const double value = upper(pick(true, there));
        const double back =
            lower(pick(true, [&](int from, int to) { return is_in(b, from) && is_in(a, to); }));
        if (&a == &b || !is_slow(value, back)) continue;
        odd_.push_back({OddLink::Kind::way, a, b, value, back});
        explain(there);
      }
    }
  }

  void look_at_links() {
    const double usual = lower(pick(true, [](int, int) { return true; }));
    for (int a = 0; a < links_.ranks(); ++a) {
      for (int b = a + 1; b < links_.ranks(); ++b) {
        const double value = std::max(rate(a, b), rate(b, a));
        if (!is_open(a, b) || !is_open(b, a) || !is_slow(value, usual)) continue;
        odd_.push_back({OddLink::Kind::link, {a}, {b}, value, usual});
      }
    }
  }

  void look_for_late_members(const std::vector<Ranks>& sets) {
    for (const Ranks& set : sets) {
      const Counts touches = [&](int a, int b) { return is_in(set, a) != is_in(set, b); };
      const double usual =
          upper(pick(false, [&](int a, int b) { return !is_in(set, a) && !is_in(set, b); }));
      const double value = lower(pick(false, touches));
      if (!is_late(value, usual)) continue;
      odd_.push_back({OddLink::Kind::late, set, {}, value, usual});
      explain(touches);
    }
  }

  void look_for_late_links() {
    const double usual = upper(pick(false, [](int, int) { return true; }));
    for (int a = 0; a < links_.ranks(); ++a) {
      for (int b = a + 1; b < links_.ranks(); ++b) {
        if (!is_open(a, b) || !is_late(latency(a, b), usual)) continue;
        odd_.push_back({OddLink::Kind::late, {a}, {b}, latency(a, b), usual});
      }
    }
  }

  const Links& links_;
  bool inside_;
  std::vector<Ranks> domains_{}, ranks_{};
  std::set<std::pair<int, int>> explained_{};
  std::vector<OddLink> odd_{};
};

std::string rate_text(double bytes_per_s) {
  if (bytes_per_s >= 1e9) return fmt::format("{:.2f} GB/s", bytes_per_s / 1e9);
  if (bytes_per_s >= 1e6) return fmt::format("{:.1f} MB/s", bytes_per_s / 1e6);
  return fmt::format("{:.1f} KB/s", bytes_per_s / 1e3);
}

std::string link_time_text(double ns) {
  if (ns >= 1e6) return fmt::format("{:.2f} ms", ns / 1e6);
  return fmt::format("{:.1f} us", ns / 1e3);
}

/// "rank 3", "the host of ranks 2 and 3".
std::string who(const Ranks& ranks) {
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  const Ranks most(ranks.begin(), ranks.end() - 1);
  return fmt::format("the host of ranks {} and {}", fmt::join(most, ", "), ranks.back());
}

std::string sentence(std::string text) {
  text.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(text.front())));
  return text;
}

std::string describe(const OddLink& odd) {
  using Kind = OddLink::Kind;
  const std::string rate = rate_text(odd.value), usual = rate_text(odd.usual);
  switch (odd.kind) {
    case Kind::sends:
      return fmt::format("{} sends slowly to all others: {}, where {} is usual.", who(odd.from),
                         rate, usual);
    case Kind::receives:
      return fmt::format("{} receives slowly from all others: {}, where {} is usual.", who(odd.to),
                         rate, usual);
    case Kind::both:
      return fmt::format("{} is slow both ways, to and from all others: {}, where {} is usual.",
                         who(odd.from), rate, usual);
    case Kind::way:
      return fmt::format("the way from {} to {} is slow: {}, where the way back carries {}.",
                         who(odd.from), who(odd.to), rate, usual);
    case Kind::link:
      return fmt::format("the link between {} and {} is slow both ways: {}, where {} is usual.",
                         who(odd.from), who(odd.to), rate, usual);
    case Kind::late: break;
  }
  return fmt::format("a flag between {} and {} takes {}, where {} is usual.", who(odd.from),
                     odd.to.empty() ? "all others" : who(odd.to), link_time_text(odd.value),
                     link_time_text(odd.usual));
}

std::string table(const Links& links, const std::string& title,
                  const std::function<double(int, int)>& value) {
  std::string text = title + "\n       ";
  for (int to = 0; to < links.ranks(); ++to) text += fmt::format("{:>9}", to);
  for (int from = 0; from < links.ranks(); ++from) {
    text += fmt::format("\n  {:>5}", from);
    for (int to = 0; to < links.ranks(); ++to) {
      text += from == to ? fmt::format("{:>9}", "-") : fmt::format("{:>9.1f}", value(from, to));
    }
  }
  return text + "\n";
}

/// "usually 1.2 us and 3.20 GB/s"; nothing if there are no such links.
std::string usual_text(const Links& links, bool inside) {
  std::vector<double> latencies, rates;
  for (int a = 0; a < links.ranks(); ++a) {
    for (int b = 0; b < links.ranks(); ++b) {
      const auto domain = [&](int rank) { return links.domains[static_cast<std::size_t>(rank)]; };
      if (a == b || (domain(a) == domain(b)) != inside) continue;
      latencies.push_back(links.latency(a, b));
      rates.push_back(links.rate(a, b));
    }
  }
  if (rates.empty()) return "";
  std::sort(latencies.begin(), latencies.end());
  std::sort(rates.begin(), rates.end());
  return fmt::format("{} usually {} and {}.\n", inside ? "Inside a host" : "Between hosts",
                     link_time_text(latencies[latencies.size() / 2]),
                     rate_text(rates[rates.size() / 2]));
}

/// Of all ranks at once; nothing on one host.
std::string together_text(const Links& links) {
  const std::vector<double>& rates = links.together_bytes_per_s;
  if (rates.empty() || rates.front() == 0) return "";
  const auto [least, most] = std::minmax_element(rates.begin(), rates.end());
  return fmt::format("While all send at once, each rank sends {} to {} to other hosts.\n",
                     rate_text(*least), rate_text(*most));
}

}  // namespace

std::vector<OddLink> odd_links(const Links& links) {
  std::vector<OddLink> odd = Search(links, false).run();
  const std::vector<OddLink> inside = Search(links, true).run();
  odd.insert(odd.end(), inside.begin(), inside.end());
  return odd;
}

std::string describe_links(const Links& links) {
  std::string text = table(links, "Latency, us (half a round trip)",
                           [&](int a, int b) { return links.latency(a, b) / 1e3; });
  text += table(links, "Rate, MB/s (row: sender)",
                [&](int a, int b) { return links.rate(a, b) / 1e6; });
  text += usual_text(links, true) + usual_text(links, false) + together_text(links);
  const std::vector<OddLink> odd = odd_links(links);
  for (const OddLink& one : odd) text += sentence(describe(one)) + "\n";
  if (odd.empty()) text += "Nothing odd.\n";
  return text;
}

nlohmann::json to_json(const Links& links) {
  nlohmann::json odd = nlohmann::json::array();
  for (const OddLink& one : odd_links(links)) odd.push_back(sentence(describe(one)));
  const auto matrix = [&](const std::vector<double>& values) {
    nlohmann::json rows = nlohmann::json::array();
    const auto width = static_cast<std::ptrdiff_t>(links.ranks());
    for (auto row = values.begin(); row != values.end(); row += width) {
      rows.push_back(std::vector<double>(row, row + width));
    }
    return rows;
  };
  return {{"ranks", links.ranks()},
          {"domains", links.domains},
          {"latency_ns", matrix(links.latency_ns)},
          {"bytes_per_s", matrix(links.bytes_per_s)},
          {"together_bytes_per_s", links.together_bytes_per_s},
          {"odd", odd}};
}

}  // namespace ferry::cli
