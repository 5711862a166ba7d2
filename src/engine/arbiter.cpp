#include "engine/arbiter.hpp"

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <ferry/error.hpp>
#include <system_error>
#include <thread>
#include <type_traits>

#include "base/text.hpp"
#include "fabric/shm/names.hpp"
#include "platform/locked_file.hpp"

namespace ferry::engine {
namespace {

constexpr std::uint64_t kMagic = 0x31424152'59525246;  // "FRRYRAB1"
constexpr std::size_t kMostShown = 200;

/// What lies in the file.
struct Written {
  std::uint64_t magic = kMagic;
  Member::Said said{};
  std::uint64_t sum = 0;
};
static_assert(std::is_trivially_copyable_v<Written>);

/// A host that fails may leave a part of what it wrote.
std::uint64_t sum_of(const Written& record) {
  std::array<std::uint64_t, kStatementWords> words{};
  std::memcpy(words.data(), &record.said, sizeof record.said);
  std::uint64_t sum = record.magic;
  for (const std::uint64_t word : words) sum = fabric::siphash({kMagic, sizeof record}, word, sum);
  return sum;
}

std::string hex(std::uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

}  // namespace

Arbiter::Arbiter(const std::string& directory, const fabric::JobKey& job, int rank, int ranks)
    : path_(directory + "/ferry-arbiter-" + hex(job[0]) + hex(job[1])), rank_(rank), ranks_(ranks) {}

void Arbiter::refuse(const std::string& what) const {
  throw Error(ErrorKind::system,
              "rank " + std::to_string(rank_) + ": the arbiter's file " +
                  printable(path_, kMostShown) + " " + what,
              {.rank = rank_});
}

void Arbiter::await() const {
  constexpr int kTries = 100;
  for (int tries = 1;; ++tries) {
    try {
      change(false, {});
      return;
    } catch (const Error&) {
      if (tries == kTries) throw;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

Arbiter::Said Arbiter::said_in(const std::string& text) const {
  if (text.empty()) return {};  // nobody has asked yet
  Written record;
  const Member::Seats all = Member::Seats::first(ranks_);
  bool sound = text.size() == sizeof record;
  if (sound) {
    std::memcpy(&record, text.data(), sizeof record);
    sound = record.magic == kMagic && record.sum == sum_of(record) &&
            of_ranks(record.said.view, all) && of_ranks(record.said.proposal, all);
  }
  if (!sound) refuse("is damaged: it does not hold what a rank of this group wrote");
  return record.said;
}

Arbiter::Said Arbiter::change(bool create, const Said& asked) const {
  Said now;
  std::exception_ptr thrown;
  const FileChange change = change_locked_file(
      path_, create, sizeof(Written) + 1, [&](const std::string& text) -> std::string {
        try {
          const Said before = said_in(text);
          if (asked.epoch == 0) return text;
          Written record;
          record.said = now = Member::arbitrate(before, asked);
          record.sum = sum_of(record);
          return {reinterpret_cast<const char*>(&record), sizeof record};
        } catch (const Error&) {
          thrown = std::current_exception();
          return text;
        }
      });
  if (thrown) std::rethrow_exception(thrown);
  if (change.failed == nullptr) return now;
  refuse("could not be " + std::string(change.failed) + ": " +
         std::generic_category().message(change.error) +
         (create ? "" : "; the directory must be one that all hosts share"));
}

}  // namespace ferry::engine
