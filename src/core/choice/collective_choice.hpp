// By which algorithm and with which shares an all_reduce takes the least time: predicted from the
// costs of links, corrected by what calls took. Pure: ranks that are given the same decide alike.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "core/choice/link_model.hpp"
#include "core/domains.hpp"
#include "ferry/collectives.hpp"

namespace ferry {

/// Of a tensor that is reduced.
struct ReduceVolume {
  double up_bytes = 0;    ///< of the partial results of all its elements
  double down_bytes = 0;  ///< of its results
  /// What is under way at once: a round or the pieces of a tree.
  double round_bytes = 1 << 19;
  /// The bytes are of codes. Encoding takes time, too, so such calls have corrections of their own.
  /// Their shares are equal: an owner does not encode its own domain's sum, so other shares would
  /// give other bits, from measured times.
  bool coded = false;
};

/// A way of an all_reduce.
struct ReduceWay {
  Algorithm algorithm = Algorithm::direct;
  std::vector<int> shares{};  ///< [domains]; empty: equal
};

/// Domain h sends and gets N (1 + (n − 2) s_h) bytes where it finishes a part s_h of N bytes, and
/// a pair carries N (s_a + s_b) each way: the parts, of kShareScale, that make the largest of their
/// times smallest (with slow pairs: nearly). Domains that would make it longer finish nothing.
inline constexpr int kShareScale = 1000;
std::vector<int> best_shares(const LinkTable& links);

/// Seconds of an all_reduce across domains, without what happens inside them.
double predicted_seconds(const ReduceWay& way, const ReduceVolume& volume, const LinkTable& links,
                         const Domains& domains);

/// Chooses. Calls of similar size have a correction for each way, by what they took: observed /
/// predicted, the middle of the last five, a quarter of the way each time; forgotten when a link
/// changes. Every 64th call takes another way, every 8th until each that is expected to take at
/// most 1.5 times as long was tried. Unequal shares that promise less than a fifth are a matter of
/// chance in what was measured, so equal ones are kept until such a try was faster.
///
/// Links are to be measured again when calls take 1.5 times as long as expected, or less than
/// 1 / 1.5 of it, three times with at most four others before each; and after 64 calls. Calls
/// between two measurements carry many times the bytes of one.
class CollectiveChoice {
 public:
  explicit CollectiveChoice(const Domains& domains, const LinkCost& first = {});

  const LinkTable& links() const { return links_; }

  struct Chosen {
    ReduceWay way;
    double predicted_s = 0;  ///< corrected
  };
  /// What is expected to take the least time. `any_order`: ring and tree may be chosen, too; they
  /// sum in orders of their own.
  Chosen best(const ReduceVolume& volume, bool any_order) const;
  /// The same, now and then another.
  Chosen next(const ReduceVolume& volume, bool any_order) const;
  /// A call of about this size was made as `next` said.
  void count(const ReduceVolume& volume) { ++sizes_[size_class(volume)].calls; }
  /// A call took so long on its slowest rank. Of other shares than equal and best ones: ignored.
  void observe(const ReduceWay& way, const ReduceVolume& volume, double seconds);
  /// The mean of what calls of this way and about this size took; where there was none, the last
  /// of about this size; 0: none yet.
  double observed_s(const ReduceWay& way, const ReduceVolume& volume) const;

  bool measure_due() const;
  /// What these probes say of a pair is to be measured once more, with the same phases.
  bool doubtful(const std::vector<LinkProbe>& probes) const { return links_.doubtful(probes); }
  void measured(const std::vector<LinkProbe>& probes);

 private:
  enum Kind { equal_shares, unequal_shares, ring, tree, kKinds };
  struct Size {
    std::array<double, kKinds> correction{};           // 0: not tried
    std::array<std::array<double, 5>, kKinds> last{};  // observed / predicted
    std::array<double, kKinds> mean_s{};
    double last_s = 0;  // of any way
    std::uint64_t calls = 0;
  };
  struct Candidate {
    Kind kind;
    Chosen chosen;
  };
  static int size_class(const ReduceVolume& volume);
  int kind_of(const ReduceWay& way) const;
  std::vector<Candidate> candidates(const ReduceVolume& volume, bool any_order) const;
  /// A call took so many times what was expected.
  void watch(double times);

  const Domains* domains_;
  Algorithm across_;  // direct where every rank is a domain of its own
  LinkTable links_;
  std::vector<int> unequal_;  // best_shares of them
  std::map<int, Size> sizes_{};
  // Since the links were measured:
  double carried_bytes_ = 0;
  int carried_calls_ = 0;
  int odd_ = 0;       // calls that were far off: above if positive, else below
  int usual_ = 0;     // others since
  double gap_bytes_;  // carried before links may be measured again
};

}  // namespace ferry
