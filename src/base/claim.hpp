// RAII claim of what may be used once: the first claim takes it, and releases it at the end of its
// scope unless it was kept.
#pragma once
#include <atomic>

namespace ferry {

/// Goes back at the end of its scope unless it is kept.
class Claim {
 public:
  explicit Claim(std::atomic<bool>& taken) : taken_(taken), mine_(!taken.exchange(true)) {}
  ~Claim() {
    if (mine_ && !kept_) taken_.store(false);
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  /// False: somebody else has it.
  explicit operator bool() const { return mine_; }
  void keep() { kept_ = true; }

 private:
  std::atomic<bool>& taken_;
  bool mine_;
  bool kept_ = false;
};

}  // namespace ferry
