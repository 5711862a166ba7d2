// The caller's own all-gather, checked.
#include <ferry/bootstrap.hpp>
#include <ferry/error.hpp>

#include <algorithm>
#include <string>
#include <utility>

#include "base/text.hpp"
#include "bootstrap/join.hpp"

namespace ferry {
namespace {

class CustomBootstrap final : public Bootstrap {
 public:
  CustomBootstrap(int rank, int size, AllGather all_gather, std::string own_address, CustomJob job)
      : rank_(rank),
        size_(size),
        function_(std::move(all_gather)),
        own_address_(std::move(own_address)),
        job_(std::move(job)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string own_address() const override { return own_address_; }
  std::string job() const override { return job_.name; }
  std::string job_key() const override { return job_.key ? job_.key() : std::string(); }

  // The deadline is the function's own business: a foreign collective cannot be cut short.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::chrono::nanoseconds /*deadline*/,
                                                 const OnWait& on_wait) override {
    if (on_wait) on_wait();
    std::vector<std::vector<std::byte>> parts = function_(mine);
    if (on_wait) on_wait();
    const std::uint64_t call = calls_++;
    check(parts, mine, call);
    return parts;
  }

 private:
  void check(const std::vector<std::vector<std::byte>>& parts, std::span<const std::byte> mine,
             std::uint64_t call) const {
    if (parts.size() != std::size_t(size_)) {
      fail("returned " + std::to_string(parts.size()) + " entries, expected " +
               std::to_string(size_) + ": one for each rank, in rank order",
           call);
    }
    const std::vector<std::byte>& own = parts[std::size_t(rank_)];
    if (std::equal(own.begin(), own.end(), mine.begin(), mine.end())) return;
    for (std::size_t r = 0; r < parts.size(); ++r) {
      if (std::equal(parts[r].begin(), parts[r].end(), mine.begin(), mine.end())) {
        fail("returned this rank's bytes as entry " + std::to_string(r) + ", expected entry " +
                 std::to_string(rank_) + ": entries must be in rank order",
             call);
      }
    }
    fail("returned " + std::to_string(own.size()) + " bytes as this rank's entry, expected the " +
             std::to_string(mine.size()) +
             " bytes that it was given; entries must keep their own length and content",
         call);
  }

  [[noreturn]] void fail(const std::string& what, std::uint64_t call) const {
    throw Error(ErrorKind::invalid_argument,
                "rank " + std::to_string(rank_) + ": the all_gather function of custom_bootstrap " +
                    what + " (call " + std::to_string(call) + ")",
                {.rank = rank_, .stage = "bootstrap: all_gather", .generation = call});
  }

  const int rank_;
  const int size_;
  const AllGather function_;
  const std::string own_address_;
  const CustomJob job_;
  std::uint64_t calls_ = 0;
};

}  // namespace

std::shared_ptr<Bootstrap> custom_bootstrap(int rank, int size, AllGather all_gather,
                                            std::string own_address, CustomJob job) {
  if (size < 1) {
    throw Error(ErrorKind::invalid_argument,
                "custom_bootstrap: size is " + std::to_string(size) + ", expected at least 1",
                {.rank = rank});
  }
  if (rank < 0 || rank >= size) {
    throw Error(ErrorKind::invalid_argument,
                "custom_bootstrap: rank is " + std::to_string(rank) + ", expected 0 to " +
                    std::to_string(size - 1),
                {.rank = rank});
  }
  if (!all_gather) {
    throw Error(ErrorKind::invalid_argument,
                "custom_bootstrap: all_gather is empty, expected a function that gathers the bytes "
                "of every rank",
                {.rank = rank});
  }
  constexpr std::size_t kMostName = 80;
  job.name = printable(job.name, kMostName);
  if (job.join || job.begin) {
    return bootstrap::lone_bootstrap(rank, size, std::move(job), std::move(own_address));
  }
  return std::make_shared<CustomBootstrap>(rank, size, std::move(all_gather),
                                           std::move(own_address), std::move(job));
}

}  // namespace ferry
