// How ranks find each other.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace ferry {

/// Called now and then (at least every 50 ms) during a wait; may throw to end the wait
/// (Python raises KeyboardInterrupt through it).
using OnWait = std::function<void()>;

/// A handful of small collective calls, used while a group is created and never after.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Every rank gives `mine` (any length); every rank gets all of them, in rank order.
  /// Throws Error(deadline) naming a rank that did not come, Error(peer_failed) naming one that
  /// died, or whatever `on_wait` throws.
  virtual std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                         std::chrono::nanoseconds deadline,
                                                         const OnWait& on_wait = {}) = 0;
  /// This machine's address on the way to the other ranks, in numbers; empty: not known, or
  /// loopback. There a rank listens that is not told where (OfiOptions::host).
  virtual std::string own_address() const { return {}; }
  /// What tells this job from others on this host, also for a process that joins it later, as
  /// messages call it: of a TCP store its address and port; empty: nothing.
  virtual std::string job() const { return {}; }
  /// More of that, which no message shows: of another store what only its clients know. It may wait
  /// for the store, and throw.
  virtual std::string job_key() const { return {}; }
  /// This process takes the place of a rank that is lost, in a group that runs: there is nobody to
  /// gather with.
  virtual bool joins() const { return false; }
  /// This process begins a group alone, which the others join: there is nobody to gather with.
  virtual bool begins() const { return false; }

  /// What the gathers from now on are for, "Group: attach": a rank that waits long says it.
  void set_stage(std::string stage) { stage_ = std::move(stage); }
  const std::string& stage() const { return stage_; }

 private:
  std::string stage_;
};

/// Ranks as threads of this process: element r is for the thread that is rank r.
std::vector<std::shared_ptr<Bootstrap>> thread_bootstrap(int ranks);

/// Where the TCP store listens and who this process is.
struct TcpOptions {
  int rank = 0;
  int size = 1;
  /// Rank 0 listens there, the others connect to it. "@name": an abstract Unix socket, which only
  /// processes of the same user on the same machine reach; needs neither port nor secret.
  std::string address = "127.0.0.1";
  std::uint16_t port = 0;  ///< must be the same on all ranks, not 0
  std::string secret{};    ///< the job's secret; the same on all ranks, not empty
  std::chrono::nanoseconds deadline = std::chrono::seconds(60);
  OnWait on_wait{};
  /// This process takes the place of a rank that is lost, in groups that run
  /// (GroupConfig::elastic); it does not look for the store, which need not run any more.
  bool join = false;
  /// This process begins groups alone (GroupConfig::elastic): all other ranks are missing at first,
  /// and join when they come. One process of the job; there is no store.
  bool begin = false;
};

/// Ranks as processes that meet at a TCP store run by rank 0. Throws Error(refused) with the
/// reason on a wrong secret, another version, another size, or a rank that is already there.
std::shared_ptr<Bootstrap> tcp_bootstrap(const TcpOptions& options);

/// TcpOptions from what `ferry run`, torchrun, srun, Open MPI or MPICH set, and FERRY_SECRET, which
/// is not needed where the launcher says that all ranks are on one host: there a Unix socket of
/// this user takes its place. `join`: FERRY_JOIN is 1, as `ferry run` sets it for a process that
/// takes the place of another; `begin`: FERRY_BEGIN is 1. Throws Error(invalid_argument) naming the
/// variable that is missing or wrong.
TcpOptions tcp_options_from_environment();

/// The caller's own all-gather: a PyTorch process group, mpi4py, anything that is collective.
using AllGather = std::function<std::vector<std::vector<std::byte>>(std::span<const std::byte>)>;
/// How processes that come later find the groups of a custom bootstrap (GroupConfig::elastic).
struct CustomJob {
  std::string name{};                 ///< as messages call it
  std::function<std::string()> key{}; /**< the same on all ranks and on those that join; nobody else
                                           can guess it. Asked when an elastic group is made */
  bool join = false;                  ///< as TcpOptions::join; `all_gather` is not called
  bool begin = false;                 ///< as TcpOptions::begin; the same
};
/// `own_address`: of this host on the network of the job, where its fabric listens for ranks of
/// other hosts if FERRY_HOST names none; empty: loopback.
std::shared_ptr<Bootstrap> custom_bootstrap(int rank, int size, AllGather all_gather,
                                            std::string own_address = {}, CustomJob job = {});

}  // namespace ferry
