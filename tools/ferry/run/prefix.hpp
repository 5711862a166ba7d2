// Lines of many processes on one output: whole, prefixed, in colour on a terminal.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <string_view>

namespace ferry::cli {

/// How a piece of text ended.
enum class LineEnd {
  newline,          ///< "\n" or "\r\n", or the end of the stream
  carriage_return,  ///< "\r": a progress bar that will be drawn again
};

/// Cuts a stream of bytes into lines. A line longer than kLongestLine is cut there.
class LineSplitter {
 public:
  static constexpr std::size_t kLongestLine = std::size_t{1} << 20;
  using Sink = std::function<void(std::string_view line, LineEnd end)>;

  void feed(std::string_view bytes, const Sink& sink);
  /// The end of the stream: gives what is left, if anything.
  void finish(const Sink& sink);

 private:
  std::string pending_;
  bool after_return_ = false;  // "\r" was the last byte: "\n" may follow
};

/// One of the launcher's own outputs (stdout or stderr).
class PrefixedOutput {
 public:
  using Clock = std::chrono::steady_clock;

  /// Whether the last thing on the terminal is a progress bar; shared by stdout and stderr.
  struct Terminal {
    bool bar_shown = false;
  };

  PrefixedOutput(int fd, int ranks, bool prefix, Terminal& terminal);

  /// Puts one line into the buffer. On a terminal a progress bar is drawn over the one before; in a
  /// file it becomes a line, at most one a second for each rank.
  struct Source {
    int rank = 0;
    Clock::time_point last_bar{};
  };
  void add(Source& source, std::string_view line, LineEnd end);
  /// A line of the launcher's own.
  void add_message(std::string_view line);
  /// Leaves the cursor on a fresh line.
  void end_bar();
  /// Writes the buffer. False when nobody reads any more.
  bool flush();

 private:
  std::string prefix_of(int rank) const;

  int fd_;
  int width_;
  bool prefix_;
  bool is_terminal_;
  bool colour_;
  Terminal& terminal_;
  std::string buffer_{};
};

}  // namespace ferry::cli
