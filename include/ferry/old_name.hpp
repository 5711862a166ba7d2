// Names that fields of options had in an earlier release.
#pragma once
#include <concepts>
#include <type_traits>
#include <utility>

namespace ferry {

/// A value given to the old name counts as if it were given to the new one, the field before it.
template <class T>
class OldName {
 public:
  OldName() = default;
  template <std::convertible_to<T> Value>
    requires(!std::same_as<std::remove_cvref_t<Value>, OldName>)
  [[deprecated("sms is now num_sms, worst_case_rows max_recv_rows, waits wait_ns")]]
  OldName(Value&& value)
      : value_(std::forward<Value>(value)), given_(true) {}
  [[deprecated("sms is now num_sms, worst_case_rows max_recv_rows, waits wait_ns")]]
  operator const T&() const {
    return value_;
  }

  void pass_on(T& now) const {
    if (given_) now = value_;
  }

 private:
  T value_{};
  bool given_ = false;
};

}  // namespace ferry
