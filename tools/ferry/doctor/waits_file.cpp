// Reads the matrix of waits: text, JSON or .npy.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "doctor/waits.hpp"

namespace ferry::cli {
namespace {

constexpr std::size_t kMostFileRanks = 4096;
constexpr std::size_t kMostShown = 400;
constexpr double kLongest = 9.3e18;  // what 64 bits hold
constexpr std::string_view kNpyMagic = "\x93NUMPY";

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  std::string shown = what.substr(0, kMostShown);  // parts of the file: nothing a terminal obeys
  std::ranges::replace_if(shown, [](unsigned char c) { return c < ' ' || c == 127; }, '?');
  throw std::runtime_error(fmt::format(
      "{}: {}; expected waits in nanoseconds, a row for each waiting rank", name, shown));
}

WaitMatrix parse_text(const std::string& name, const std::string& content) {
  WaitMatrix rows;
  std::istringstream lines(content);
  for (std::string line; std::getline(lines, line);) {
    line.resize(std::min(line.find('#'), line.size()));
    for (char& c : line) c = c == ',' || c == ';' ? ' ' : c;
    std::istringstream words(line);
    std::vector<double> row;
    for (std::string word; words >> word;) {
      std::size_t used = 0;
      double value = 0;
      try {
        value = std::stod(word, &used);
      } catch (const std::exception&) {
        used = 0;
      }
      if (used != word.size()) refuse(name, fmt::format("\"{}\" is no number", word));
      row.push_back(value);
    }
    if (!row.empty()) rows.push_back(std::move(row));
  }
  return rows;
}

WaitMatrix parse_json(const std::string& name, const std::string& content) {
  try {
    const nlohmann::json found = nlohmann::json::parse(content);
    if (!found.empty() && found.front().is_number()) return {found.get<std::vector<double>>()};
    return found.get<WaitMatrix>();
  } catch (const nlohmann::json::exception& error) {
    refuse(name, fmt::format("not a JSON list of lists of numbers ({})", error.what()));
  }
}

/// The value of a key in a .npy header, up to what ends it.
std::string npy_value(const std::string& header, const std::string& key, char end) {
  const std::size_t at = header.find("'" + key + "':");
  if (at == std::string::npos) return {};
  const std::size_t first = header.find_first_not_of(' ', at + key.size() + 3);
  const std::size_t last = header.find(end, first);
  return last == std::string::npos ? std::string() : header.substr(first, last - first + 1);
}

WaitMatrix parse_npy(const std::string& name, const std::string& content) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(content[i]); };
  if (content.size() < 12) refuse(name, "a .npy file that is cut off");
  const bool wide = byte(6) > 1;
  const std::size_t start = wide ? 12 : 10;
  std::size_t length = byte(8) | static_cast<std::size_t>(byte(9)) << 8;
  if (wide) length |= static_cast<std::size_t>(byte(10)) << 16;
  if (wide) length |= static_cast<std::size_t>(byte(11)) << 24;
  if (length > content.size() - start) refuse(name, "a .npy file that is cut off");
  const std::string header = content.substr(start, length);
  const std::string dtype = npy_value(header, "descr", ',');
  std::string shape = npy_value(header, "shape", ')');
  const bool negative = shape.find('-') != std::string::npos;
  for (char& c : shape) c = c >= '0' && c <= '9' ? c : ' ';
  std::istringstream extents(shape);
  std::vector<std::size_t> sizes;
  for (std::size_t size = 0; extents >> size;) sizes.push_back(size);
  const bool known = dtype == "'<i8'," || dtype == "'<u8'," || dtype == "'<f8',";
  if (!known || negative || sizes.empty() || sizes.size() > 2 ||
      header.find("'fortran_order': False") == std::string::npos) {
    refuse(name, "a .npy file of another kind (" + header.substr(0, 80) + ")");
  }
  const std::size_t rows = sizes.size() == 2 ? sizes[0] : 1, columns = sizes.back();
  if (rows > kMostFileRanks || columns > kMostFileRanks ||
      rows * columns * 8 != content.size() - start - length) {
    refuse(name, "a .npy file whose size does not fit its shape");
  }
  WaitMatrix matrix(rows, std::vector<double>(columns));
  const char* at = content.data() + start + length;
  for (auto& row : matrix) {
    for (double& value : row) {
      std::int64_t number = 0;
      std::memcpy(&number, at, sizeof(number));
      std::memcpy(&value, at, sizeof(value));
      if (dtype[2] == 'i') value = static_cast<double>(number);
      if (dtype[2] == 'u') value = static_cast<double>(static_cast<std::uint64_t>(number));
      at += sizeof(number);
    }
  }
  return matrix;
}

}  // namespace

WaitMatrix parse_waits(const std::string& name, const std::string& content) {
  if (content.starts_with(kNpyMagic)) return parse_npy(name, content);
  const std::size_t first = content.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && content[first] == '[') return parse_json(name, content);
  return parse_text(name, content);
}

WaitMatrix read_waits(const std::vector<std::string>& files) {
  WaitMatrix waits;
  for (const std::string& file : files) {
    std::error_code unknown;
    if (std::filesystem::is_directory(file, unknown)) refuse(file, "a directory");
    if (std::filesystem::is_character_file(file, unknown)) refuse(file, "a device");
    std::ifstream stream(file, std::ios::binary);
    if (!stream) throw std::runtime_error(fmt::format("{}: cannot be read", file));
    const std::string content{std::istreambuf_iterator<char>(stream), {}};
    const WaitMatrix part = parse_waits(file, content);
    if (files.size() > 1 && part.size() != 1) {
      refuse(file, fmt::format("{} rows, of {} files with a row each", part.size(), files.size()));
    }
    waits.insert(waits.end(), part.begin(), part.end());
  }
  const std::string name = files.size() == 1 ? files.front() : files.front() + " and the others";
  if (waits.empty() || waits.size() > kMostFileRanks) {
    refuse(name, fmt::format("{} rows", waits.size()));
  }
  for (const auto& row : waits) {
    if (row.size() != waits.size()) {
      refuse(name, fmt::format("{} rows, but one of {} values", waits.size(), row.size()));
    }
    for (const double value : row) {
      if (!(value >= 0 && value <= kLongest)) refuse(name, fmt::format("a wait of {}", value));
    }
  }
  return waits;
}

}  // namespace ferry::cli
