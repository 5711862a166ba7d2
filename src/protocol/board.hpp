// A board: the newest of what one rank says, in its own memory, where all others read it whole,
// also when the rank dies while it writes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/sync.hpp"

namespace ferry::protocol {

/// What a board relies on, as parameters, so that the explorer can break it.
struct BoardTraits {
  /// One entry is read while the other is written.
  static constexpr std::uint64_t kEntries = 2;
  /// Release: who reads a word of a newer text also sees that the one before it was published, and
  /// reads again.
  static constexpr order kWord = order::release;
  static constexpr order kPublish = order::release;
  static constexpr bool kReadsAgain = true;
};

/// A text is `words` words. The board is one line with the number of texts, then kEntries entries;
/// zeroed at first. One thread writes, any number of others read.
template <class Traits = BoardTraits>
class Board {
 public:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t bytes(std::size_t words) {
    return kLine + Traits::kEntries * words * sizeof(std::uint64_t);
  }

  Board(std::byte* base, std::size_t words) : base_(base), words_(words) {}

  /// How many texts there were; 0: none yet.
  std::uint64_t number() const { return count().load(order::acquire); }

  void publish(const std::uint64_t* text) const {
    // relaxed: this thread wrote it.
    const std::uint64_t next = count().load(order::relaxed) + 1;
    for (std::size_t i = 0; i < words_; ++i) word(next, i).store(text[i], Traits::kWord);
    // Release: who acquires the number sees the whole text.
    count().store(next, Traits::kPublish);
  }

  /// The number of the text that was read; 0: there is none.
  std::uint64_t read(std::uint64_t* text) const {
    for (;;) {
      const std::uint64_t last = number();
      if (last == 0) return 0;
      // Acquire: see kWord.
      for (std::size_t i = 0; i < words_; ++i) text[i] = word(last, i).load(order::acquire);
      // relaxed: a newer number is seen if a word of a newer text was.
      if (!Traits::kReadsAgain || count().load(order::relaxed) == last) return last;
    }
  }

 private:
  Flag count() const { return Flag{reinterpret_cast<std::uint64_t*>(base_)}; }
  Flag word(std::uint64_t text, std::size_t i) const {
    const std::size_t entry = static_cast<std::size_t>(text % Traits::kEntries);
    return Flag{reinterpret_cast<std::uint64_t*>(base_ + kLine) + entry * words_ + i};
  }

  std::byte* base_;
  std::size_t words_;
};

}  // namespace ferry::protocol
