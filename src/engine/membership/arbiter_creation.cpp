#include "engine/membership/arbiter_creation.hpp"

#include <exception>
#include <utility>

namespace ferry::engine {
namespace {

std::string late_arbiter(int rank) {
  return "rank " + std::to_string(rank) +
         ": Group: arbiter: the directory did not answer within the deadline; is the server of its "
         "file system there?";
}

}  // namespace

std::shared_ptr<const ArbiterFile> arbiter_of(const GroupConfig& config, const Domains& domains,
                                              const fabric::Fabric& fabric) {
  if (config.arbiter.empty()) return nullptr;
  const int rank = fabric.rank(), size = fabric.size();
  if (domains.count() == 1 || !fabric.carries_texts() || size > SeatTraits::kSeats) {
    throw Error(ErrorKind::unsupported,
                "Group: arbiter: got " + std::to_string(size) + " ranks in " +
                    std::to_string(domains.count()) + " domains over " +
                    std::string(fabric.name()) + "; expected at most " +
                    std::to_string(SeatTraits::kSeats) +
                    " in several domains that libfabric joins (network ofi)",
                {rank, -1, "Group: arbiter", 0, 0, 0});
  }
  return std::make_shared<ArbiterFile>(config.arbiter, fabric.job(), rank, size);
}

std::optional<Arbiter> asked(const std::shared_ptr<const ArbiterFile>& file) {
  if (!file) return std::nullopt;
  return Arbiter([file](const Member::Said& said) { return file->decide(said); });
}

void check_arbiter(const GroupConfig& config, const Domains& domains,
                   const fabric::Fabric& fabric) {
  const auto file = arbiter_of(config, domains, fabric);
  if (!file) return;
  at_most_for<void>(config.deadline, late_arbiter(fabric.rank()), [file] { file->check_there(); });
}

void leave_arbiter(const std::shared_ptr<const ArbiterFile>& file, const GroupView& view,
                   const std::function<void()>& before) noexcept {
  if (!file) return;
  try {
    Member::Seats seats;
    for (const int rank : view.ranks) seats.add(rank);
    at_most_for<void>(std::chrono::seconds(1), "", [file, seats, before] {
      if (before) before();
      file->leave(seats);
    });
  } catch (const std::exception&) {  // the file stays
  }
}

ArbiterCreation::~ArbiterCreation() {
  if (!held_) return;
  keep();
  try {
    file_->leave(Member::Seats::of(rank_));  // the last one: removes it
  } catch (const Error&) {                   // it stays
  }
}

void ArbiterCreation::create() {
  if (!file_ || !makes_) return;
  held_ = at_most_for<LockedFile>(deadline_, late_arbiter(rank_),
                                  [file = file_] { return file->create(); });
}

void ArbiterCreation::check() const {
  if (!file_ || makes_) return;
  at_most_for<void>(deadline_, late_arbiter(rank_), [file = file_] { file->check_locked(); });
}

}  // namespace ferry::engine
