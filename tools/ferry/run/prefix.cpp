#include "run/prefix.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "platform/terminal.hpp"

namespace ferry::cli {
namespace {

constexpr std::string_view kClearLine = "\r\x1b[K";
constexpr auto kBarEvery = std::chrono::seconds(1);

bool wants_colour(bool terminal) {
  const char* no_colour = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  return terminal && (no_colour == nullptr || *no_colour == '\0') &&
         !(term != nullptr && std::string_view(term) == "dumb");
}

// At most `columns` characters of UTF-8, so that a bar never wraps; with escapes, all of it.
std::string_view clip(std::string_view text, std::size_t columns) {
  if (text.find('\x1b') != std::string_view::npos) return text;
  std::size_t seen = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool starts_character = (static_cast<unsigned char>(text[i]) & 0xc0) != 0x80;
    if (starts_character && seen++ == columns) return text.substr(0, i);
  }
  return text;
}

}  // namespace

void LineSplitter::feed(std::string_view bytes, const Sink& sink) {
  while (!bytes.empty()) {
    if (after_return_) {
      after_return_ = false;
      const bool newline = bytes.front() == '\n';
      if (newline || !pending_.empty()) {
        sink(pending_, newline ? LineEnd::newline : LineEnd::carriage_return);
      }
      pending_.clear();
      if (newline) bytes.remove_prefix(1);
      continue;
    }
    const std::size_t end = bytes.find_first_of("\r\n");
    const std::size_t room = kLongestLine - pending_.size();
    if (std::min(end, bytes.size()) > room) {
      pending_.append(bytes.substr(0, room));
      bytes.remove_prefix(room);
      sink(pending_, LineEnd::newline);
      pending_.clear();
      continue;
    }
    pending_.append(bytes.substr(0, end));
    if (end == std::string_view::npos) return;
    if (bytes[end] == '\r') {
      after_return_ = true;
    } else {
      sink(pending_, LineEnd::newline);
      pending_.clear();
    }
    bytes.remove_prefix(end + 1);
  }
}

void LineSplitter::finish(const Sink& sink) {
  if (!pending_.empty()) sink(pending_, LineEnd::newline);
  pending_.clear();
  after_return_ = false;
}

PrefixedOutput::PrefixedOutput(int fd, int ranks, bool prefix, Terminal& terminal)
    : fd_(fd),
      width_(static_cast<int>(std::to_string(ranks - 1).size())),
      prefix_(prefix),
      is_terminal_(is_terminal(fd)),
      colour_(wants_colour(is_terminal_)),
      terminal_(terminal) {}

std::string PrefixedOutput::prefix_of(int rank) const {
  constexpr std::array kColours = {36, 33, 32, 35, 34, 31};
  if (!prefix_) return {};
  if (!colour_) return fmt::format("[{:>{}}] ", rank, width_);
  return fmt::format("\x1b[{}m[{:>{}}]\x1b[0m ",
                     kColours[static_cast<std::size_t>(rank) % kColours.size()], rank, width_);
}

void PrefixedOutput::add(Source& source, std::string_view line, LineEnd end) {
  const bool bar = end == LineEnd::carriage_return;
  if (!is_terminal_) {
    const Clock::time_point now = Clock::now();
    if (bar && now - source.last_bar < kBarEvery) return;
    if (bar) source.last_bar = now;
  } else if (bar) {
    const std::size_t taken = prefix_ ? static_cast<std::size_t>(width_) + 3 : 0;
    const std::size_t columns = columns_of(fd_);
    buffer_ += kClearLine;
    buffer_ += prefix_of(source.rank);
    buffer_ += clip(line, columns > taken + 1 ? columns - taken - 1 : 1);
    terminal_.bar_shown = true;
    return;
  }
  add_message(prefix_of(source.rank).append(line));
}

void PrefixedOutput::add_message(std::string_view line) {
  if (is_terminal_ && terminal_.bar_shown) {
    buffer_ += kClearLine;
    terminal_.bar_shown = false;
  }
  buffer_ += line;
  buffer_ += '\n';
}

void PrefixedOutput::end_bar() {
  if (is_terminal_ && terminal_.bar_shown) {
    buffer_ += '\n';
    terminal_.bar_shown = false;
  }
}

bool PrefixedOutput::flush() {
  const bool read_by_somebody = write_all(fd_, buffer_);
  buffer_.clear();
  return read_by_somebody;
}

}  // namespace ferry::cli
