// Of a process that takes the place of a lost rank: there is no store to meet at.
#include <string>
#include <utility>

#include "bootstrap/socket.hpp"
#include "bootstrap/tcp.hpp"

namespace ferry::bootstrap {

namespace {

class JoiningBootstrap final : public Bootstrap {
 public:
  explicit JoiningBootstrap(const TcpOptions& options)
      : rank_(options.rank),
        size_(options.size),
        job_(StoreAddress{options.address, options.port}.text()) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string job() const override { return job_; }
  bool joins() const override { return true; }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> /*mine*/,
                                                 std::chrono::nanoseconds /*deadline*/,
                                                 const OnWait& /*on_wait*/) override {
    throw Error(ErrorKind::unsupported,
                "rank " + std::to_string(rank_) +
                    ": all_gather: this process takes the place of a lost rank, so there is nobody "
                    "to gather with; make a Group with elastic, and meet the others by a bootstrap "
                    "at another port",
                {.rank = rank_, .stage = "bootstrap: all_gather"});
  }

 private:
  int rank_;
  int size_;
  std::string job_;
};

}  // namespace

std::shared_ptr<Bootstrap> joining_bootstrap(const TcpOptions& options) {
  check(options);
  return std::make_shared<JoiningBootstrap>(options);
}

}  // namespace ferry::bootstrap
