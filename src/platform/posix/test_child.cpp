#include "platform/test_child.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <span>
#include <tuple>
#include <utility>

#include "platform/posix/process_group.hpp"

namespace ferry::test {

std::shared_ptr<void> shared_block(std::size_t bytes) {
  return forked_block(bytes);
}

Child::Child(const std::function<int()>& body, std::chrono::seconds longest_life) {
  process_.pid = fork_process([&] {
    alarm(static_cast<unsigned>(longest_life.count()));
    return body();
  });
}

Child::~Child() {
  if (waited_) return;
  kill();
  wait();
}

Child::Child(Child&& other) noexcept
    : process_(std::move(other.process_)), waited_(std::exchange(other.waited_, true)) {}

void Child::kill() {
  signal(SIGKILL);
}

void Child::signal(int number) {
  if (!waited_) ::kill(static_cast<pid_t>(process_.pid), number);
}

bool Child::ended() const {
  return waited_ || end_of(process_);
}

Child::End Child::wait() {
  waited_ = true;
  const ProcessEnd end = reap(process_.pid);
  return {.killed = end.signal != 0, .code = end.signal != 0 ? end.signal : end.code};
}

Lines::Lines() {
  int error = 0;
  std::tie(parent_, child_) = connected_pair(error);
  if (error != 0) std::abort();
}

void Lines::say(const std::string& line) const {
  const std::string whole = line + "\n";
  for (auto left = std::as_bytes(std::span(whole)); !left.empty();) {
    const Transfer put = write_to(child_, left);
    if (put.ended) std::_Exit(3);
    left = left.subspan(put.bytes);
    if (!left.empty()) usleep(1000);
  }
}

std::string Lines::next(std::chrono::nanoseconds within) {
  const auto due = std::chrono::steady_clock::now() + within;
  for (;;) {
    if (const auto at = heard_.find('\n'); at != std::string::npos) {
      const std::string line = heard_.substr(0, at);
      heard_.erase(0, at + 1);
      return line;
    }
    const auto left =
        std::max<std::chrono::nanoseconds>(due - std::chrono::steady_clock::now(), {});
    std::array<Polled, 1> polled{{{.socket = parent_.get(), .read = true}}};
    const bool came = wait_for(polled, std::chrono::ceil<std::chrono::milliseconds>(left));
    std::array<char, 4096> bytes{};
    const Transfer got =
        came ? read_from(parent_, std::as_writable_bytes(std::span(bytes))) : Transfer{};
    heard_.append(bytes.data(), got.bytes);
    if (got.ended || (!came && left.count() == 0)) return std::exchange(heard_, {});
  }
}

}  // namespace ferry::test
