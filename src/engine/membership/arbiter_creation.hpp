// The arbiter of a group, from its creation to its end.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/domains.hpp"
#include "engine/membership/arbiter.hpp"
#include "fabric/fabric.hpp"
#include "ferry/group.hpp"

namespace ferry::engine {

/// Null: the group has none. Throws Error(unsupported) where there can be none.
std::shared_ptr<const ArbiterFile> arbiter_of(const GroupConfig& config, const Domains& domains,
                                              const fabric::Fabric& fabric);
/// For Regroup.
std::optional<Arbiter> asked(const std::shared_ptr<const ArbiterFile>& file);
/// Of a process that joins: throws unless it sees the arbiter.
void check_arbiter(const GroupConfig& config, const Domains& domains, const fabric::Fabric& fabric);
/// This rank leaves the group with this view, waiting at most a second; null: it does nothing.
/// `before`: what it does first.
void leave_arbiter(const std::shared_ptr<const ArbiterFile>& file, const GroupView& view,
                   const std::function<void()>& before = {}) noexcept;

/// At creation rank 0, or who begins alone, makes the arbiter's file and has it locked until all
/// have seen that.
class ArbiterCreation {
 public:
  ArbiterCreation(const GroupConfig& config, const Domains& domains, const fabric::Fabric& fabric,
                  bool makes)
      : file_(arbiter_of(config, domains, fabric)),
        rank_(fabric.rank()),
        makes_(makes),
        deadline_(config.deadline) {}
  ~ArbiterCreation();
  ArbiterCreation(const ArbiterCreation&) = delete;
  ArbiterCreation& operator=(const ArbiterCreation&) = delete;

  void create();
  void check() const;
  void keep() { held_.reset(); }

 private:
  std::shared_ptr<const ArbiterFile> file_;
  int rank_;
  bool makes_;
  std::chrono::nanoseconds deadline_;
  std::optional<LockedFile> held_{};
};

}  // namespace ferry::engine
