#include "engine/row_guess.hpp"

#include <algorithm>

namespace ferry::engine {

void RowGuess::learn(std::int64_t tokens, std::int64_t rows) {
  past_[known_++ % past_.size()] = {tokens, rows};
}

std::int64_t RowGuess::rows(std::int64_t tokens, int ranks) const {
  const std::int64_t all = tokens * ranks;
  if (known_ == 0) return all;
  // Some more, so that few tokens, whose numbers vary more, are not guessed too low.
  constexpr std::int64_t kSpare = 32;
  std::int64_t most = 0;
  for (std::size_t i = 0; i < std::min(known_, past_.size()); ++i) {
    const Past& past = past_[i];
    // In floating point: the product may not fit, and it is a guess.
    const double scale = tokens > 0 && past.tokens > 0
                             ? static_cast<double>(tokens) / static_cast<double>(past.tokens)
                             : 1.0;
    most = std::max(most, static_cast<std::int64_t>(static_cast<double>(past.rows) * scale));
  }
  const std::int64_t guess = most + most / 4 + kSpare;
  return tokens > 0 ? std::min(guess, std::max(most, all)) : guess;
}

}  // namespace ferry::engine
