// Tensors that the ranks of a domain read and write where they lie: in registered memory, or in any
// memory where the ranks are threads of one process.
#pragma once
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "host/collectives/engine.hpp"

namespace ferry::host {

/// This rank's tensor in one call. The message says where it lies, if all ranks reach it there.
class Lent {
 public:
  Lent(HostCollectives& all, StepMessage& head, const void* data, std::size_t bytes);
  /// Waits for those that are at it: also a call that failed here gives the memory back to the
  /// caller only then.
  ~Lent();
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

 private:
  HostCollectives& all_;
  bool by_pointer_ = false;
};

/// Whether the message of a rank says that it lends its tensor.
bool lends(const StepMessage& head);

/// Of the ranks' last messages: whether some, and whether all lend their tensors.
struct Lenders {
  bool some = false;
  bool every = true;
  explicit Lenders(HostCollectives& all);
};

/// The tensors of ranks of the domain that lend them. They stay until this ends; the ranks must
/// meet afterwards.
class Borrowed {
 public:
  /// `bytes(member)`: of its tensor. Throws what became of a rank that has left the call.
  Borrowed(HostCollectives& all, const char* call, std::span<const int> members,
           const std::function<std::size_t(int)>& bytes);
  ~Borrowed();
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  /// In the order of the members.
  const std::vector<std::byte*>& tensors() const { return tensors_; }

 private:
  std::byte* take(const char* call, int member, std::size_t bytes);
  void give_back();

  HostCollectives& all_;
  std::vector<int> taken_{};  // ranks whose tensor is given back at the end
  std::vector<std::byte*> tensors_{};
};

}  // namespace ferry::host
