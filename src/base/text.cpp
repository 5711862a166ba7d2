#include "base/text.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <locale>
#include <sstream>
#include <vector>

namespace ferry {

std::string exact_seconds(std::chrono::nanoseconds time) {
  char text[48];
  // 15 digits: nanoseconds of up to eleven days.
  std::snprintf(text, sizeof text, "%.15g s", static_cast<double>(time.count()) / 1e9);
  return text;
}

std::string spell_ranks(std::span<const int> ranks, std::size_t total) {
  constexpr std::size_t kMostNamed = 8;
  total = std::max(total, ranks.size());
  if (total == 0) return "no rank";
  std::vector<std::string> names;
  std::size_t at = 0;
  while (at < ranks.size() && names.size() < kMostNamed) {
    std::size_t end = at + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - at == 2) end = at + 1;  // two are named one by one
    names.push_back(std::to_string(ranks[at]));
    if (end - at > 1) names.back() += "-" + std::to_string(ranks[end - 1]);
    at = end;
  }
  if (total > at) names.push_back(std::to_string(total - at) + " more");
  std::string text = total == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

std::string spell_numbers(std::span<const int> numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

namespace {

/// Of the character that `text` begins with; 0 if there is none (overlong forms, surrogates).
std::size_t utf8_bytes(std::string_view text) {
  const auto first = static_cast<unsigned char>(text.front());
  if (first < 0x80) return 1;
  const std::size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < bytes) return 0;
  const auto second = static_cast<unsigned char>(text[1]);
  const bool strict = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                      (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  if (strict) return 0;
  for (const char c : text.substr(1, bytes - 1)) {
    if ((static_cast<unsigned char>(c) & 0xc0) != 0x80) return 0;
  }
  return bytes;
}

}  // namespace

std::string printable(std::string_view text, std::size_t most) {
  std::string out(text.substr(0, most));
  if (text.size() > most) {
    const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; };
    std::size_t end = most;
    while (end > 0 && continues(text[end])) --end;
    out.resize(end);
  }
  for (std::size_t at = 0; at < out.size();) {
    char& c = out[at];
    const std::size_t bytes = utf8_bytes(std::string_view(out).substr(at));
    if (bytes == 0) c = '?';
    if (bytes == 1 && (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)) c = ' ';
    at += std::max<std::size_t>(bytes, 1);
  }
  return out;
}

std::optional<double> take_number(std::string_view& text) {
  constexpr std::size_t kMost = 64;
  std::istringstream in{std::string(text.substr(0, kMost))};
  in.imbue(std::locale::classic());
  double number = 0;
  if (!(in >> std::noskipws >> number) || !std::isfinite(number)) return std::nullopt;
  text.remove_prefix(in.eof() ? std::min(text.size(), kMost)
                              : static_cast<std::size_t>(in.tellg()));
  return number;
}

}  // namespace ferry
