// Pre-announced signals: the source's side of counted signals for a flag that rises by equal steps,
// each value behind one piece. The source tells many of them at once; then the piece alone raises
// the flag, for each has a tag of its own. A signal that turns out otherwise goes by itself and
// replaces what was told of its number.
#pragma once

#include <cstdint>
#include <optional>

namespace ferry::protocol {

/// What the bookkeeping relies on, as parameters, so that a test can break it.
struct PreAnnouncedTraits {
  /// So many signals are told at once, after so many equal steps.
  static constexpr std::uint64_t kCount = 64;
  static constexpr std::uint64_t kRegular = 8;
  static constexpr std::uint64_t kMaxStep = 0xffffffff;
  /// A piece stands for the value that was told, and for no other one.
  static constexpr bool foreseen(std::uint64_t value, std::uint64_t told) { return value == told; }
  /// Every number is told once at most: what is told later may arrive first.
  static constexpr bool may_tell(std::uint64_t next, std::uint64_t end) { return next >= end; }
};

/// The next signal of a flag.
struct SignalNumber {
  std::uint64_t sequence = 0;
  std::optional<std::uint64_t> tag{};  ///< of the one piece that says it, too, if that was told
};

/// Pre-announced signals: number `sequence` + i says `value` + i * `step` behind one piece of tag
/// `tag` + i, for i below Traits::kCount.
struct PreAnnouncement {
  std::uint64_t sequence = 0;
  std::uint64_t value = 0;
  std::uint64_t step = 0;
  std::uint64_t tag = 0;
};

/// Numbers the signals of one flag word, at their source.
template <class Traits = PreAnnouncedTraits>
class PreAnnouncedSignals {
 public:
  /// `one_piece`: all that goes before it is one piece, or may go with one.
  SignalNumber next(std::uint64_t value, bool one_piece) {
    ++sequence_;
    const std::uint64_t step = value - value_;
    regular_ = one_piece && step == step_ ? regular_ + 1 : 0;
    step_ = step;
    value_ = value;
    const std::uint64_t i = sequence_ - told_.sequence;
    if (i >= Traits::kCount || !one_piece || told_.sequence == 0 ||
        !Traits::foreseen(value, told_.value + i * told_.step)) {
      return {sequence_, std::nullopt};
    }
    return {sequence_, told_.tag + i};
  }

  /// Whether the signals to come can be told.
  bool ready() const {
    return regular_ >= Traits::kRegular && step_ <= Traits::kMaxStep &&
           (told_.sequence == 0 ||
            Traits::may_tell(sequence_ + 1, told_.sequence + Traits::kCount));
  }

  /// Tells them; `tag`: the first of as many unused ones.
  PreAnnouncement tell(std::uint64_t tag) {
    told_ = {sequence_ + 1, value_ + step_, step_, tag};
    return told_;
  }

 private:
  std::uint64_t sequence_ = 0;  // of the last signal
  std::uint64_t value_ = 0;     // of it
  std::uint64_t step_ = 0;      // to it
  std::uint64_t regular_ = 0;   // successive equal steps
  PreAnnouncement told_{};
};

}  // namespace ferry::protocol
