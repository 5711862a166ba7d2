#include "platform/test_child.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

#include "platform/pages.hpp"
#include "platform/process.hpp"
#include "platform/windows/child_process.hpp"
#include "platform/windows/system.hpp"

namespace ferry::test {
namespace {

constexpr const char* kVariable = "FERRY_TEST_CHILD";  // "<pid of the parent>.<which child>"
constexpr UINT kKilled = 0xC000013A;

/// Of the running test, once in each repetition.
struct Turn {
  std::string test{};
  std::int64_t started = 0;
  int blocks = 0;
  int children = 0;
};

Turn& turn() {
  static Turn now;
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = std::string(info->test_suite_name()) + "." + info->name();
  const std::int64_t started = info->result()->start_timestamp();
  if (now.test != name || now.started != started) now = {.test = name, .started = started};
  return now;
}

/// In a child: which one it is, from 1 on; otherwise 0.
int own_turn() {
  const char* text = std::getenv(kVariable);
  return text == nullptr
             ? 0
             : std::atoi(std::string(text).substr(std::string(text).find('.') + 1).c_str());
}

std::int64_t parent() {
  const char* text = std::getenv(kVariable);
  return text == nullptr ? process_id() : std::atoll(text);
}

}  // namespace

std::shared_ptr<void> shared_block(std::size_t bytes) {
  const std::string name = "/ferry-test-" + std::to_string(parent()) + "-" + turn().test + "-" +
                           std::to_string(turn().blocks++);
  std::string flat = name;
  for (char& c : flat) c = c == '/' && &c != flat.data() ? '.' : c;
  SectionFailure failure;
  Section section;
  if (own_turn() == 0) {
    section = make_section(flat, bytes, failure);
  } else {
    section = open_section(flat, bytes, SectionAccess::write, std::nullopt, failure);
    // The parent has done with it: this child's turn comes later.
    if (section.data == nullptr) section.data = private_pages(bytes, 4096, failure.error);
  }
  if (section.data == nullptr) throw std::runtime_error("no memory to share: " + flat);
  return {section.data, [flat, bytes](void* block) {
            remove_section(flat);
            unmap_pages(static_cast<std::byte*>(block), bytes);
          }};
}

Child::Child(const std::function<int()>& body, std::chrono::seconds /*longest_life*/) {
  const int which = ++turn().children;
  if (which == own_turn()) {
    const int code = body();
    std::fflush(nullptr);
    windows::end_this_process(code);
  }
  if (own_turn() != 0) return;  // another child: it is the parent's
  char program[MAX_PATH];
  GetModuleFileNameA(nullptr, program, sizeof program);
  const std::string command = "\"" + std::string(program) + "\" --gtest_filter=" + turn().test +
                              " --gtest_repeat=1 --gtest_output=";
  process_ = windows::start_again(
      command, kVariable, std::to_string(process_id()) + "." + std::to_string(which), false);
}

Child::~Child() {
  if (!process_.handle) return;
  kill();
  wait();
}

Child::Child(Child&& other) noexcept : process_(std::move(other.process_)) {}

void Child::kill() {
  if (process_.handle) windows::end_process(process_, kKilled);
}

bool Child::ended() const {
  return !process_.handle || end_of(process_);
}

Child::End Child::wait() {
  if (!process_.handle) return {};
  WaitForSingleObject(windows::handle_of(process_.handle.get()), INFINITE);
  const int code = end_of(process_)->code;
  process_.handle.reset();
  return {.killed = static_cast<UINT>(code) == kKilled, .code = code};
}

}  // namespace ferry::test
