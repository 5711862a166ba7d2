// An error that one thread caught and other threads throw.
#pragma once
#include <exception>
#include <optional>
#include <string>

#include "ferry/error.hpp"

namespace ferry {

/// Of Ferry's own errors every thread throws a copy with text of its own: std::exception_ptr would
/// hand all threads one object, and the last of them frees what another has just read, in an order
/// that the thread sanitizer cannot see. Others are thrown as they are.
class KeptError {
 public:
  KeptError() = default;

  /// Inside a catch block: the error that is being handled.
  static KeptError current() {
    KeptError kept;
    try {
      throw;
    } catch (const Error& error) {
      kept = of(error);
    } catch (...) {
      kept.other_ = std::current_exception();
    }
    return kept;
  }

  static KeptError of(const Error& error) {
    KeptError kept;
    kept.own_ = Own{error.kind(), error.what(), error.context()};
    return kept;
  }

  explicit operator bool() const { return own_.has_value() || other_ != nullptr; }

  /// Throws it; one must be held.
  [[noreturn]] void raise() const {
    if (own_) throw Error(own_->kind, own_->message, own_->context);
    std::rethrow_exception(other_);
  }

 private:
  struct Own {
    ErrorKind kind;
    std::string message;
    ErrorContext context;
  };
  std::optional<Own> own_{};
  std::exception_ptr other_{};
};

}  // namespace ferry
