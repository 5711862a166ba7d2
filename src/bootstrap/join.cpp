// Of a process that begins a group alone, or takes the place of a rank that is not there: there is
// no store to meet at.
#include <string>
#include <utility>

#include "bootstrap/socket.hpp"
#include "bootstrap/tcp.hpp"

namespace ferry::bootstrap {

namespace {

class LoneBootstrap final : public Bootstrap {
 public:
  explicit LoneBootstrap(const TcpOptions& options)
      : rank_(options.rank),
        size_(options.size),
        begins_(options.begin),
        job_(StoreAddress{options.address, options.port}.text()) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string job() const override { return job_; }
  bool joins() const override { return !begins_; }
  bool begins() const override { return begins_; }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> /*mine*/,
                                                 std::chrono::nanoseconds /*deadline*/,
                                                 const OnWait& /*on_wait*/) override {
    throw Error(ErrorKind::unsupported,
                "rank " + std::to_string(rank_) + ": all_gather: this process " +
                    (begins_ ? "begins a group alone" : "takes the place of a rank") +
                    ", so there is nobody to gather with; make a Group with elastic, and meet the "
                    "others by a bootstrap "
                    "at another port",
                {.rank = rank_, .stage = "bootstrap: all_gather"});
  }

 private:
  int rank_;
  int size_;
  bool begins_;
  std::string job_;
};

}  // namespace

std::shared_ptr<Bootstrap> lone_bootstrap(const TcpOptions& options) {
  check(options);
  if (options.join && options.begin) {
    throw Error(ErrorKind::invalid_argument,
                "rank " + std::to_string(options.rank) +
                    ": tcp: got both join and begin; one process begins, the others join it",
                {.rank = options.rank, .stage = "bootstrap: tcp"});
  }
  return std::make_shared<LoneBootstrap>(options);
}

}  // namespace ferry::bootstrap
