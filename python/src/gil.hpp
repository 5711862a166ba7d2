// Waiting without the GIL, Ctrl-C during waits, fork, and the end of the interpreter.
//
// Rules that hold for every file of the glue:
// - a call that can wait runs inside `without_gil`;
// - an object whose destructor can wait, join a thread or unmap memory lives in a `Held`;
// - a Python object that C++ keeps lives in a `PythonCallable` or under the GIL, never in a
//   closure that a worker thread may drop;
// - a thread that Python did not start never takes the GIL, so that nothing can block while the
//   interpreter ends.
#pragma once
#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "ferry/bootstrap.hpp"
#include "ferry/error.hpp"

#ifdef Py_LIMITED_API
// Not of the stable ABI, but in every CPython since 3.4.
extern "C" PyAPI_FUNC(int) PyGILState_Check();
#endif

namespace ferry::python {

namespace nb = nanobind;

/// Remembers the calling thread as Python's main thread; call once, while the module is imported.
void remember_main_thread();

/// The `on_wait` of every wait that Python starts. In the main thread it runs Python's signal
/// handlers about every 20 ms and throws what they raise (KeyboardInterrupt); in a stream's worker
/// it throws Error(interrupted) once the stream was told to stop; elsewhere it does nothing.
/// Holds no Python object.
OnWait python_on_wait();

/// How many times a signal handler has ended a wait by raising.
std::uint64_t interrupts();

/// A flag that ends the waits of one worker thread.
using StopFlag = std::shared_ptr<std::atomic<bool>>;
/// From now on `flag` ends waits of the calling (worker) thread.
void obey(StopFlag flag);

/// The interpreter is about to end: ends the waits of all workers, for good, and keeps threads that
/// come back from a wait out of it, but for those that ask for the GIL already, which get it first.
/// With the GIL, which it gives up meanwhile.
void interpreter_ends();

/// Gives the GIL up while it lives. A thread that would take it back from an interpreter that ends
/// stays here instead, until the process is gone: Python would end the thread by unwinding it, and
/// C++ answers that with std::terminate.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil();
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

/// How many times this process is a forked child since the module was loaded.
std::uint64_t fork_count();

namespace detail {
/// The Python error that `on_wait` raised in this thread's current wait; then clears it.
std::exception_ptr take_pending_error();
}  // namespace detail

/// Runs `call` without the GIL. When `on_wait` raised a Python error, that error comes out,
/// whatever the engine made of it on the way.
template <class Call>
auto without_gil(Call&& call) {
  detail::take_pending_error();
  try {
    ReleasedGil released;
    return std::forward<Call>(call)();
  } catch (...) {
    if (std::exception_ptr error = detail::take_pending_error()) std::rethrow_exception(error);
    throw;
  }
}

/// A value whose destructor may wait: it is dropped without the GIL, and not at all in a child
/// process that fork made, where its threads and peers do not exist.
template <class T>
class Held {
 public:
  explicit Held(T value) : value_(std::make_unique<T>(std::move(value))) {}
  Held(Held&&) noexcept = default;
  Held& operator=(Held&&) = delete;
  ~Held() {
    if (!value_) return;
    if (fork_count() != forks_) {
      (void)value_.release();
    } else if (PyGILState_Check()) {
      ReleasedGil released;
      value_.reset();
    }
  }
  /// Throws Error(unsupported) in a forked child.
  T& get() const {
    if (fork_count() != forks_) {
      throw Error(ErrorKind::unsupported,
                  "this process was forked after the object was made, and the child cannot use it: "
                  "make the group in the process that uses it (multiprocessing: start method "
                  "\"spawn\")");
    }
    return *value_;
  }
  T* operator->() const { return &get(); }

 private:
  std::unique_ptr<T> value_;
  std::uint64_t forks_ = fork_count();
};

/// A Python callable that C++ may copy, call and drop in any thread that Python knows.
class PythonCallable {
 public:
  explicit PythonCallable(nb::object callable);
  /// Only while holding the GIL.
  nb::handle get() const { return *callable_; }

 private:
  std::shared_ptr<nb::object> callable_;
};

}  // namespace ferry::python
