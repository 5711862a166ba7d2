#include "core/text.hpp"

#include <cstdio>

namespace ferry {

std::string exact_seconds(std::chrono::nanoseconds time) {
  char text[48];
  // 15 digits: nanoseconds of up to eleven days.
  std::snprintf(text, sizeof text, "%.15g s", static_cast<double>(time.count()) / 1e9);
  return text;
}

std::string printable(std::string_view text, std::size_t most) {
  std::string out(text.substr(0, most));
  if (text.size() > most) {
    const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; };
    std::size_t end = most;
    while (end > 0 && continues(text[end])) --end;
    out.resize(end);
  }
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  return out;
}

}  // namespace ferry
