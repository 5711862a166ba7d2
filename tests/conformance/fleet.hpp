// Runs ranks as threads or as processes, with a deadline, and collects what they found wrong.
#pragma once
#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ferry/bootstrap.hpp"
#include "ferry/group.hpp"
#include "ferry/tensor.hpp"
#include "golden/hashes.hpp"

namespace ferry::conformance {

struct Board;

/// What joins the ranks of a fleet.
struct Wires {
  Wires(FabricKind inside) : fabric(inside) {}  // of one domain
  Wires(FabricKind inside, int ranks_of_a_domain, FabricKind between, Crossing how)
      : fabric(inside), domain_size(ranks_of_a_domain), network(between), crossing(how) {}
  FabricKind fabric;  ///< shm, and ofi where they can be: ranks are processes; else threads
  int domain_size = 0;
  FabricKind network = FabricKind::automatic;
  Crossing crossing = Crossing::automatic;
  friend auto operator<=>(const Wires&, const Wires&) = default;
};

/// One rank of a fleet: who it is, and where it reports. Nothing here throws.
class Rank {
 public:
  Rank(Board& board, int rank, int size, const Wires& wires, std::shared_ptr<Bootstrap> bootstrap,
       Device where = {})
      : board_(board),
        seat_(rank),
        rank_(rank),
        size_(size),
        wires_(wires),
        bootstrap_(std::move(bootstrap)),
        where_(where) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  FabricKind fabric() const { return wires_.fabric; }
  const Wires& wires() const { return wires_; }
  const std::shared_ptr<Bootstrap>& bootstrap() const { return bootstrap_; }
  /// Where its arrays lie: a GPU for the CUDA engine.
  Device where() const { return where_; }
  /// This rank among those that are left when `dead` is gone. Of processes, once in a fleet.
  Rank without(int dead) const;
  /// Collective: returns when every rank has called it.
  void meet() const { bootstrap_->all_gather({}, std::chrono::seconds(100)); }
  /// What is said with every failure from now on; also restarts the deadline.
  void begin(const std::string& what);
  void fail(const std::string& text);
  /// Returns `ok`.
  bool check(bool ok, const std::string& text) {
    if (!ok) fail(text);
    return ok;
  }
  template <class A, class B>
  bool equal(const A& got, const B& expected, const char* what) {
    if (got == expected) return true;
    fail(std::string(what) + ": got " + std::to_string(got) + ", expected " +
         std::to_string(expected));
    return false;
  }
  int failures() const;
  /// From here on all that is compared with the reference is hashed.
  void hash_results() { hash_.emplace(); }
  /// Null: not asked for.
  golden::Hash* hash() { return hash_ ? &*hash_ : nullptr; }

 private:
  Board& board_;
  int seat_;  // on the board
  int rank_;
  int size_;
  Wires wires_;
  std::shared_ptr<Bootstrap> bootstrap_;
  Device where_;
  std::optional<golden::Hash> hash_{};
};

struct Fleet {
  Wires wires = FabricKind::local;
  int ranks = 1;
  /// Between two `begin` of a rank. A fleet of processes that exceeds it is killed; threads cannot
  /// be, so the program says where it hangs and ends.
  std::chrono::seconds deadline = std::chrono::seconds(40);
  int gpus = 0;  ///< > 0: the CUDA engine, rank r on GPU r mod `gpus`; ranks never in this process
  int victim = -1;  ///< of processes: this rank is expected to be killed
  std::uint64_t* results =
      nullptr;  ///< the hashes of all ranks are added to it (Rank::hash_results)
};

/// Runs `body` once for each rank and returns what went wrong, at most 20 lines. A rank that throws
/// reports what it threw. No thread of this process may run when processes are asked for.
std::vector<std::string> run_fleet(const Fleet& fleet, const std::function<void(Rank&)>& body);

/// All lines as one text.
std::string joined(const std::vector<std::string>& lines);

/// Whether this system has fork.
bool can_fork();
/// True where ranks cannot be processes: there, and under the thread sanitizer.
bool only_threads();

/// True under a sanitizer, where a case takes several times as long. Tests that repeat one code
/// over many cases take fewer of them there: what a sanitizer sees, it sees in those.
bool sanitized();

/// A configuration for tests: the fleet's fabric and device, a deadline of 10 s (GPUs: 30 s,
/// because ranks that share one take turns).
GroupConfig group_config(const Rank& rank, std::int64_t experts,
                         std::size_t memory_bytes = std::size_t{4} << 20);

}  // namespace ferry::conformance
