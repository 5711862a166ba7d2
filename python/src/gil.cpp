#include "gil.hpp"

#include <thread>

#include "ferry/error.hpp"

namespace ferry::python {
namespace {

constexpr auto kSignalCheckPeriod = std::chrono::milliseconds(20);

std::atomic<unsigned long> main_thread{0};
std::atomic<std::uint64_t> interrupt_count{0};
std::atomic<std::uint64_t> forks{0};
std::atomic<bool> exiting{false};
std::atomic<int> returning{0};  // threads that take the GIL back, having seen nothing of an exit
thread_local StopFlag worker_stop;
thread_local std::exception_ptr pending_error;

/// The thread that forks is the main thread of the child.
void after_fork_in_child() {
  forks.fetch_add(1, std::memory_order_relaxed);
  returning.store(0, std::memory_order_relaxed);  // they are not in the child
  main_thread.store(PyThread_get_thread_ident(), std::memory_order_relaxed);
}

bool is_main_thread() {
  return PyThread_get_thread_ident() == main_thread.load(std::memory_order_relaxed);
}

void stop_worker_if_told() {
  if (!worker_stop) return;
  if (exiting.load(std::memory_order_relaxed) || worker_stop->load(std::memory_order_relaxed)) {
    throw Error(ErrorKind::interrupted, "the wait ended: its stream was dropped or Python exits");
  }
}

void run_signal_handlers() {
  thread_local std::chrono::steady_clock::time_point last{};
  const auto now = std::chrono::steady_clock::now();
  if (now - last < kSignalCheckPeriod) return;
  last = now;
  nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  interrupt_count.fetch_add(1, std::memory_order_relaxed);
  pending_error = std::make_exception_ptr(nb::python_error());
  std::rethrow_exception(pending_error);
}

}  // namespace

void remember_main_thread() {
  const nb::object main = nb::module_::import_("threading").attr("main_thread")();
  main_thread.store(nb::cast<unsigned long>(main.attr("ident")), std::memory_order_relaxed);
  const nb::object os = nb::module_::import_("os");
  if (nb::hasattr(os, "register_at_fork")) {  // Windows has no fork
    os.attr("register_at_fork")(nb::arg("after_in_child") = nb::cpp_function(&after_fork_in_child));
  }
}

OnWait python_on_wait() {
  return [] {
    stop_worker_if_told();
    if (is_main_thread()) run_signal_handlers();
  };
}

// Sequentially consistent, as in interpreter_ends: either this thread sees that Python exits, or it
// is seen there and gets the GIL before.
ReleasedGil::~ReleasedGil() {
  const bool counts = !is_main_thread();
  if (counts) returning.fetch_add(1);
  if (counts && exiting.load()) {
    returning.fetch_sub(1);
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  PyEval_RestoreThread(state_);
  if (counts) returning.fetch_sub(1);
}

std::uint64_t interrupts() {
  return interrupt_count.load(std::memory_order_relaxed);
}
void obey(StopFlag flag) {
  worker_stop = std::move(flag);
}
void interpreter_ends() {
  exiting.store(true);
  constexpr auto kMost = std::chrono::seconds(5);  // should a thread keep the GIL from the others
  const auto until = std::chrono::steady_clock::now() + kMost;
  PyThreadState* own = PyEval_SaveThread();
  while (returning.load() > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  PyEval_RestoreThread(own);
}
std::uint64_t fork_count() {
  return forks.load(std::memory_order_relaxed);
}

std::exception_ptr detail::take_pending_error() {
  return std::exchange(pending_error, nullptr);
}

PythonCallable::PythonCallable(nb::object callable)
    : callable_(new nb::object(std::move(callable)), [](nb::object* object) {
        if (!nb::is_alive()) return;  // the interpreter has ended: the object went with it
        nb::gil_scoped_acquire gil;
        delete object;
      }) {}

}  // namespace ferry::python
