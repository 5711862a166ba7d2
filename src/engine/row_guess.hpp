// How many rows a dispatch will bring, guessed before the counts are known, so that it need not
// wait for them.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace ferry::engine {

/// Remembers what the last dispatches brought. Guarded by the group's turn.
class RowGuess {
 public:
  /// A dispatch of `tokens` own tokens has brought this many rows.
  void learn(std::int64_t tokens, std::int64_t rows);
  /// A quarter more than the most of those, in proportion to the tokens, but no more than `ranks`
  /// ranks with as many tokens can send; without any, as many as those. 0: no guess.
  std::int64_t rows(std::int64_t tokens, int ranks) const;

  /// Whether memory should be registered for a guess. Not for the first, which may be far too high,
  /// and not after there was none.
  bool worth_memory() const { return known_ > 0 && !poor_; }
  void found_no_memory() { poor_ = true; }

 private:
  struct Past {
    std::int64_t tokens = 0;
    std::int64_t rows = 0;
  };
  std::array<Past, 8> past_{};
  std::size_t known_ = 0;  // how often learnt
  bool poor_ = false;
};

}  // namespace ferry::engine
