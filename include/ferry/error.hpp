// What Ferry throws.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ferry {

/// What kind of thing went wrong. Python has one exception class for each.
enum class ErrorKind {
  invalid_argument,  ///< an argument was refused before anything moved
  mismatch,          ///< ranks disagree: configuration, call, dtype, sizes
  deadline,          ///< a wait reached its deadline
  peer_failed,       ///< a rank died or reported a failure
  peer_left,         ///< a rank destroyed its group while others still exchange
  evicted,           ///< the peers went on without this rank: they masked it in latency mode
                     ///< (`rejoin`), or called `Group::regroup`
  refused,           ///< the bootstrap turned this process away (secret, version, size, rank taken)
  interrupted,       ///< the caller's `on_wait` asked to stop (Ctrl-C)
  destroyed,         ///< use after destroy
  exhausted,         ///< no room: memory, capacity, live results
  unsupported,       ///< not built, or not possible on this machine
  system,            ///< the operating system refused a call
  left_behind [[deprecated("now evicted")]] = evicted,
};

/// The name of a kind, as used in messages: "invalid argument", "deadline", ...
const char* name_of(ErrorKind kind);

/// Who, where and when. Fields that do not apply keep their defaults.
struct ErrorContext {
  int rank = -1;                 ///< the rank that raises
  int peer = -1;                 ///< the rank it names: the one that died, is late, differs
  std::string stage{};           ///< "plan: counts", "dispatch: rows", "combine: rows", ...
  std::uint64_t generation = 0;  ///< number of the exchange step
  std::uint64_t expected = 0;    ///< flag value waited for
  std::uint64_t seen = 0;        ///< flag value found
};

/// Every error of Ferry. `what()` is one sentence that names rank, peer, stage or argument, what
/// was got, what was expected, and where it helps, what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, ErrorContext context = {});
  ErrorKind kind() const noexcept { return kind_; }
  const ErrorContext& context() const noexcept { return context_; }
  int rank() const noexcept { return context_.rank; }
  int peer() const noexcept { return context_.peer; }

 private:
  ErrorKind kind_;
  ErrorContext context_;
};

}  // namespace ferry
