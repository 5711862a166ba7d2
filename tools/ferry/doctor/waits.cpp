#include "doctor/waits.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace ferry::cli {
namespace {

constexpr double kLong = 3, kLeastNs = 1000;
constexpr double kMatters = 0.1;  // of the worst

enum class Middle { lower, upper };

/// Of an even number of values the lower or the upper one in the middle. Who is suspected is judged
/// by the lower one, and compared with the upper one: one large value of two proves nothing.
double median(std::vector<double> values, Middle middle) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[(values.size() - (middle == Middle::lower ? 1 : 0)) / 2];
}

/// The values of a part of the matrix, without the diagonal.
template <class Counts>
std::vector<double> pick(const WaitMatrix& waits, const Counts& counts) {
  std::vector<double> picked;
  for (std::size_t i = 0; i < waits.size(); ++i) {
    for (std::size_t j = 0; j < waits.size(); ++j) {
      if (i != j && counts(i, j)) picked.push_back(waits[i][j]);
    }
  }
  return picked;
}

bool is_long(double waited, double usual) {
  return waited >= kLong * usual && waited >= usual + kLeastNs;
}

std::string wait_time_text(double ns) {
  if (ns >= 1e9) return fmt::format("{:.2f} s", ns / 1e9);
  if (ns >= 1e6) return fmt::format("{:.2f} ms", ns / 1e6);
  if (ns >= 1e3) return fmt::format("{:.1f} us", ns / 1e3);
  return fmt::format("{:.0f} ns", ns);
}

double without_cpu(const WaitMatrix& waits, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  return rank < 0 ? 0 : waits[r][r];
}

/// A wait grows by the time that either end had no CPU. Of the many ranks at the other end of a
/// sender or receiver the one in the middle counts, as for the wait.
void judge(const WaitMatrix& waits, SlowPart& part) {
  std::vector<double> others;
  for (int r = 0; r < static_cast<int>(waits.size()); ++r) {
    if (r != part.from && r != part.to) others.push_back(without_cpu(waits, r));
  }
  const bool many = part.kind != SlowPart::Kind::link;
  part.no_cpu_ns = without_cpu(waits, part.from) + without_cpu(waits, part.to) +
                   (many ? median(others, Middle::lower) : 0);
  part.by_itself = is_long(part.waited_ns - part.no_cpu_ns, part.usual_ns);
}

std::string words_of(const SlowPart& part) {
  const std::string waited = wait_time_text(part.waited_ns), usual = wait_time_text(part.usual_ns);
  if (!part.by_itself) {
    const std::string what =
        part.kind == SlowPart::Kind::sender
            ? fmt::format("The others waited {} for rank {}", waited, part.from)
        : part.kind == SlowPart::Kind::receiver
            ? fmt::format("Rank {} waited {} for the others", part.to, waited)
            : fmt::format("Rank {} waited {} for rank {}", part.to, waited, part.from);
    return fmt::format(
        "{}, where {} is usual, but these ranks had no CPU for {}: more is ready to run on their "
        "machine than it has cores. Nobody is slow by that.",
        what, usual, wait_time_text(part.no_cpu_ns));
  }
  switch (part.kind) {
    case SlowPart::Kind::sender:
      return fmt::format(
          "Rank {} is a slow sender: the others waited {} for it, and {} for each other. It comes "
          "late to its calls, or sends slowly.",
          part.from, waited, usual);
    case SlowPart::Kind::receiver:
      return fmt::format(
          "Rank {} is a slow receiver: it waited {} for the others, which waited {} for each "
          "other. "
          "What is sent to it arrives late, or it comes early to its calls.",
          part.to, waited, usual);
    case SlowPart::Kind::link: break;
  }
  return fmt::format(
      "The link from rank {} to rank {} is slow: rank {} waited {} for rank {}, where {} is usual.",
      part.from, part.to, part.to, waited, part.from, usual);
}

}  // namespace

std::vector<SlowPart> slow_parts(const WaitMatrix& waits) {
  std::vector<SlowPart> parts;
  std::set<std::size_t> senders, receivers;
  const std::size_t ranks = waits.size();
  for (std::size_t r = 0; r < ranks && ranks > 2; ++r) {
    const double by_column =
        median(pick(waits, [&](auto, auto j) { return j == r; }), Middle::lower);
    const double by_row = median(pick(waits, [&](auto i, auto) { return i == r; }), Middle::lower);
    const double usual =
        median(pick(waits, [&](auto i, auto j) { return i != r && j != r; }), Middle::upper);
    // One that is both is named for what is worse.
    if (by_column >= by_row && is_long(by_column, usual)) {
      senders.insert(r);
      parts.push_back({SlowPart::Kind::sender, static_cast<int>(r), -1, by_column, usual});
    } else if (is_long(by_row, usual)) {
      receivers.insert(r);
      parts.push_back({SlowPart::Kind::receiver, -1, static_cast<int>(r), by_row, usual});
    }
  }
  // A slow sender is late itself, and so waits for nobody.
  const auto plain = [&](auto i, auto j) {
    return senders.count(i) == 0 && senders.count(j) == 0 && receivers.count(i) == 0;
  };
  const double usual = median(pick(waits, plain), Middle::lower);
  for (std::size_t i = 0; i < ranks; ++i) {
    for (std::size_t j = 0; j < ranks; ++j) {
      if (i == j || !plain(i, j) || !is_long(waits[i][j], usual)) continue;
      parts.push_back(
          {SlowPart::Kind::link, static_cast<int>(j), static_cast<int>(i), waits[i][j], usual});
    }
  }
  double worst = 0;
  for (const SlowPart& part : parts) worst = std::max(worst, part.waited_ns);
  std::erase_if(parts, [&](const SlowPart& part) { return part.waited_ns < kMatters * worst; });
  for (SlowPart& part : parts) judge(waits, part);
  return parts;
}

std::string describe_waits(const WaitMatrix& waits) {
  const std::vector<SlowPart> parts = slow_parts(waits);
  std::string text;
  for (const SlowPart& part : parts) text += (text.empty() ? "" : "\n") + words_of(part);
  if (!parts.empty()) {
    if (waits.size() == 2) text += "\nWith two ranks a slow sender, receiver and link look alike.";
    double no_cpu = 0;
    for (std::size_t r = 0; r < waits.size(); ++r) no_cpu = std::max(no_cpu, waits[r][r]);
    if (no_cpu < kLeastNs) {
      text +=
          "\nNo rank says on the diagonal that it had no CPU. Where more is ready to run than "
          "there "
          "are cores, a healthy rank looks slow: the guide (Who is slow) has it said.";
    }
    return text;
  }
  const std::vector<double> all = pick(waits, [](auto, auto) { return true; });
  if (all.empty()) return "Nothing odd: one rank waits for nobody.";
  return fmt::format("Nothing odd: ranks waited {} for each other, at most {}.",
                     wait_time_text(median(all, Middle::lower)),
                     wait_time_text(*std::max_element(all.begin(), all.end())));
}

}  // namespace ferry::cli
