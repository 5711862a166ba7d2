// `ferry doctor --waits`: from how long ranks waited for each other to who is slow.
#pragma once
#include <string>
#include <vector>

namespace ferry::cli {

/// Row i: how many nanoseconds rank i waited for each source. Square; on the diagonal, where nobody
/// waits, how long rank i was ready to run meanwhile and had no CPU.
using WaitMatrix = std::vector<std::vector<double>>;

/// One file with the matrix, or one for each rank in rank order with its row. Text (numbers
/// between commas, blanks and line ends; a `#` begins a comment), JSON (a list of lists) or .npy
/// (int64, uint64 or float64). Throws std::runtime_error with words that name the file.
WaitMatrix read_waits(const std::vector<std::string>& files);
WaitMatrix parse_waits(const std::string& name, const std::string& content);

struct SlowPart {
  enum class Kind { sender, receiver, link };
  Kind kind = Kind::sender;
  int from = -1;          ///< the slow sender, or the sender of the slow link
  int to = -1;            ///< the slow receiver, or the receiver of the slow link
  double waited_ns = 0;   ///< for it
  double usual_ns = 0;    ///< elsewhere
  double no_cpu_ns = 0;   ///< for how long one of both ends had no CPU
  bool by_itself = true;  ///< false: it is not slow but for that time, and not to blame
};

/// Who is slow: a sender if most ranks waited long for it, a receiver if it waited long for most
/// ranks, else a link. Long: three times what is usual elsewhere, and a microsecond more. What is
/// less than a tenth of the worst is left out.
std::vector<SlowPart> slow_parts(const WaitMatrix& waits);

/// A sentence for each, or one that says that nothing is odd.
std::string describe_waits(const WaitMatrix& waits);

}  // namespace ferry::cli
