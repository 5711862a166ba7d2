// The product of the main axes, and the sizes of cases.
#include <cstring>

#include "case.hpp"
#include "random.hpp"

namespace ferry::conformance {
namespace {

/// The axes that the product is taken over; the others are drawn for each case.
bool is_product_axis(Mode mode, const char* name) {
  for (const char* axis : {"fabric", "ranks", "hidden", "topk", "routes", "dtype"}) {
    if (std::strcmp(axis, name) == 0) return true;
  }
  return std::strcmp(name, mode == Mode::latency ? "wire" : "layout") == 0 ||
         std::strcmp(name, "hook") == 0;
}

}  // namespace

std::int64_t product(Mode mode) {
  std::int64_t count = 1;
  for (const Axis& axis : axes(mode)) count *= is_product_axis(mode, axis.name) ? axis.choices : 1;
  return count;
}

Case numbered_case(Mode mode, std::int64_t number, std::uint64_t seed) {
  Random random(
      mix(seed, 121 + static_cast<std::uint64_t>(mode), static_cast<std::uint64_t>(number)));
  std::vector<int> choice;
  for (const Axis& axis : axes(mode)) {
    if (is_product_axis(mode, axis.name)) {
      choice.push_back(static_cast<int>(number % axis.choices));
      number /= axis.choices;
    } else {
      choice.push_back(static_cast<int>(random.below(axis.choices)));
    }
  }
  for (std::size_t a = 0; a < choice.size(); ++a) {
    for (std::size_t b = a + 1; b < choice.size(); ++b) {
      // Of two choices that cannot meet the later one gives way.
      while (excluded(mode, static_cast<int>(a), choice[a], static_cast<int>(b), choice[b])) {
        choice[b] = (choice[b] + 1) % axes(mode)[b].choices;
      }
    }
  }
  Case c = make_case(mode, choice);
  c.seed = random.next() >> 1;
  const std::int64_t most = c.hidden > 5000 ? 2 : c.hidden > 1000 ? 3 : 8;
  c.tokens = 1 + random.below(most);
  c.capacity = 2 * most;
  return c;
}

void size_case(Case& c, std::uint64_t seed) {
  Random random(seed);
  c.seed = random.next() >> 1;
  const std::int64_t most = c.hidden > 5000 ? 4 : c.hidden > 1000 ? 6 : 20;
  c.tokens = 1 + random.below(most);
  c.capacity = 2 * most;
}

}  // namespace ferry::conformance
