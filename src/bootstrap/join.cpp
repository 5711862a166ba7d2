// Of a process that begins a group alone, or takes the place of a rank that is not there: there is
// no store to meet at.
#include "bootstrap/join.hpp"

#include <ferry/error.hpp>
#include <string>
#include <utility>

namespace ferry::bootstrap {

namespace {

class LoneBootstrap final : public Bootstrap {
 public:
  LoneBootstrap(int rank, int size, CustomJob job, std::string own_address)
      : rank_(rank), size_(size), job_(std::move(job)), own_address_(std::move(own_address)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string own_address() const override { return own_address_; }
  std::string job() const override { return job_.name; }
  std::string job_key() const override { return job_.key ? job_.key() : std::string(); }
  bool joins() const override { return job_.join; }
  bool begins() const override { return job_.begin; }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> /*mine*/,
                                                 std::chrono::nanoseconds /*deadline*/,
                                                 const OnWait& /*on_wait*/) override {
    throw Error(ErrorKind::unsupported,
                "rank " + std::to_string(rank_) + ": all_gather: this process " +
                    (job_.begin ? "begins a group alone" : "takes the place of a rank") +
                    ", so there is nobody to gather with; make a Group with elastic, and meet the "
                    "others by a bootstrap "
                    "at another port",
                {.rank = rank_, .stage = "bootstrap: all_gather"});
  }

 private:
  int rank_;
  int size_;
  CustomJob job_;
  std::string own_address_;
};

}  // namespace

std::shared_ptr<Bootstrap> lone_bootstrap(int rank, int size, CustomJob job,
                                          std::string own_address) {
  if (job.join && job.begin) {
    throw Error(ErrorKind::invalid_argument,
                "rank " + std::to_string(rank) +
                    ": bootstrap: got both join and begin; one process begins, the others join it",
                {.rank = rank, .stage = "bootstrap"});
  }
  return std::make_shared<LoneBootstrap>(rank, size, std::move(job), std::move(own_address));
}

}  // namespace ferry::bootstrap
