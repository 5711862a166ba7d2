// The ranks of a group, as they are now, for collectives or another group: no store, no host.
#include <algorithm>
#include <string>
#include <utility>

#include "core/access.hpp"
#include "core/check.hpp"
#include "core/engine.hpp"
#include "engine/gather.hpp"
#include "ferry/group.hpp"

namespace ferry {
namespace {

class GroupBootstrap final : public Bootstrap {
 public:
  explicit GroupBootstrap(std::shared_ptr<Engine> engine)
      : engine_(std::move(engine)), view_(engine_->group_view()) {}

  int rank() const override {
    const auto here = std::lower_bound(view_.ranks.begin(), view_.ranks.end(), engine_->rank());
    return static_cast<int>(here - view_.ranks.begin());
  }
  int size() const override { return static_cast<int>(view_.ranks.size()); }

  /// Where the group's own network listens.
  std::string own_address() const override {
    for (const NicStats& nic : engine_->nics()) {
      if (!nic.address.empty()) return nic.address;
    }
    return {};
  }

  /// Its deadline and its caller are the group's: in the order of the group's calls.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::chrono::nanoseconds /*deadline*/,
                                                 const OnWait& on_wait) override {
    if (on_wait) on_wait();
    check_epoch();
    if (mine.size() > engine::kMostGatheredBytes) {  // before the group is in a call
      refuse("all_gather", "mine", std::to_string(mine.size()) + " bytes",
             "at most " + std::to_string(engine::kMostGatheredBytes));
    }
    auto all = engine_->gather(mine);
    std::vector<std::vector<std::byte>> parts;
    for (const int rank : view_.ranks) parts.push_back(std::move(all[std::size_t(rank)]));
    if (on_wait) on_wait();
    return parts;
  }

 private:
  void check_epoch() const {
    if (engine_->epoch() == view_.epoch) return;
    refuse("group_bootstrap", "group",
           "one in epoch " + std::to_string(engine_->epoch()) + ", by a bootstrap of epoch " +
               std::to_string(view_.epoch),
           "a bootstrap made after regroup");
  }

  const std::shared_ptr<Engine> engine_;
  const GroupView view_;
};

}  // namespace

std::shared_ptr<Bootstrap> group_bootstrap(const Group& group) {
  if (group.destroyed()) {
    throw Error(ErrorKind::destroyed, "group_bootstrap: the group is destroyed");
  }
  return std::make_shared<GroupBootstrap>(Access::engine(group));
}

}  // namespace ferry
