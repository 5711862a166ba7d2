#include "base/process_limits.hpp"

#include <cerrno>
#include <ferry/error.hpp>
#include <new>
#include <optional>
#include <system_error>

#include "platform/limits.hpp"

namespace ferry {
namespace {

/// ulimit counts in KiB.
std::string spelt(const char* what, std::uint64_t limit, char option) {
  return std::string("; ") + what + " is limited to " + std::to_string(limit) + " bytes (ulimit -" +
         option + " " + std::to_string(limit / 1024) + ")";
}

}  // namespace

std::string memory_limit_text(std::uint64_t needed) {
  const auto space = limit_of(Limit::address_space);
  const auto data = limit_of(Limit::data);
  if (!space && !data) return {};
  std::string text;
  if (space) {
    text = spelt("the address space of this process", *space, 'v');
    if (const std::uint64_t taken = address_space_taken(); taken > 0) {
      text += ", of which " + std::to_string(taken) + " are taken";
    }
  }
  if (data) text += spelt("the memory of this process", *data, 'd');
  if (needed > 0) text += "; " + std::to_string(needed) + " more were needed";
  return text + "; raise the limit (ulimit -" + (space ? "v" : "d") +
         " unlimited) before it starts";
}

std::string locked_memory_limit_text() {
  const auto limit = limit_of(Limit::locked);
  if (!limit) return {};
  return spelt("memory that is locked for a NIC", *limit, 'l') +
         "; raise the limit (ulimit -l unlimited) before it starts";
}

std::string file_limit_text(std::uint64_t bytes) {
  const auto limit = limit_of(Limit::file_size);
  if (!limit || bytes <= *limit) return {};
  return "files of this process may have " + std::to_string(*limit) + " bytes (ulimit -f), and " +
         "this needs " + std::to_string(bytes) +
         "; raise the limit (ulimit -f unlimited) before it starts";
}

std::string thread_limit_text(int error) {
  if (error != EAGAIN && error != ENOMEM) return std::generic_category().message(error);
  std::string text = "no more threads";
  if (const auto limit = limit_of(Limit::threads)) {
    text += "; this user may have " + std::to_string(*limit) + " (ulimit -u)";
  }
  // A thread's stack is address space, as large as ulimit -s says.
  const std::string memory = memory_limit_text(limit_of(Limit::stack).value_or(0));
  if (!memory.empty()) return text + memory;
  return text + "; raise the limit, also that of the container (pids.max), or end some threads";
}

void throw_in_words(int rank, const std::string& call) {
  const auto exhausted = [&](const std::string& what) {
    return Error(ErrorKind::exhausted, "rank " + std::to_string(rank) + ": " + call + ": " + what,
                 {.rank = rank, .peer = rank, .stage = call});
  };
  try {
    throw;
  } catch (const std::bad_alloc&) {
    const std::string limit = memory_limit_text(0);
    throw exhausted("no memory" +
                    (limit.empty() ? "; give this process more or use smaller batches" : limit));
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    if (code == EAGAIN) throw exhausted(thread_limit_text(code));
    if (code == ENOMEM) throw exhausted("no memory" + memory_limit_text(0));
    throw;
  }
}

}  // namespace ferry
