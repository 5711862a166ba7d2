#include "engine/membership/arbiter.hpp"

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ferry/error.hpp>
#include <filesystem>
#include <system_error>
#include <thread>
#include <type_traits>

#include "base/text.hpp"
#include "fabric/shm/names.hpp"

namespace ferry::engine {
namespace {

constexpr std::uint64_t kMagic = 0x32424152'59525246;  // "FRRYRAB2"
constexpr std::size_t kMostOfPathShown = 200;
constexpr const char* kWhereShared = "; the directory must be one that all hosts share";

std::string hex(std::uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

}  // namespace

/// What lies in the file.
struct ArbiterFile::Record {
  std::uint64_t magic = kMagic;
  Said said{};
  Member::Seats gone{};  // ranks that have left the group
  std::uint64_t sum = 0;

  /// A host that fails may leave a part of what it wrote.
  std::uint64_t sum_now() const {
    std::array<std::uint64_t, sizeof(Record) / sizeof sum - 1> words{};
    std::memcpy(words.data(), this, sizeof words);
    std::uint64_t all = 0;
    for (const std::uint64_t word : words) all = fabric::siphash({kMagic, words.size()}, word, all);
    return all;
  }
  bool sound(const Member::Seats& ranks) const {
    if (magic != kMagic || sum != sum_now() || !ranks.contains(gone)) return false;
    if (said.epoch == 0) return said.round == 0 && said.accepted == 0;  // nobody has asked yet
    const bool proposed = said.accepted != 0;
    return said.view.epoch == said.epoch && of_ranks(said.view, ranks) &&
           said.accepted <= said.round && proposed == (said.proposal.epoch == said.epoch + 1) &&
           of_ranks(said.proposal, ranks);
  }
};

ArbiterFile::ArbiterFile(const std::string& directory, const fabric::JobKey& group, int rank,
                         int ranks)
    : path_(directory + "/ferry-arbiter-" + hex(group[0]) + hex(group[1])),
      rank_(rank),
      ranks_(ranks) {
  static_assert(std::is_trivially_copyable_v<Record> &&
                sizeof(Record) % sizeof(std::uint64_t) == 0);
}

void ArbiterFile::refuse(const std::string& what) const {
  throw Error(ErrorKind::system,
              "rank " + std::to_string(rank_) + ": the arbiter's file " +
                  printable(path_, kMostOfPathShown) + " " + what,
              {.rank = rank_});
}

void ArbiterFile::refuse(const LockedFile& file, const char* what_to_do) const {
  const std::string why =
      file.busy() ? "another rank has it locked" : std::generic_category().message(file.error());
  refuse("could not be " + std::string(file.failed()) + ": " + why + what_to_do);
}

LockedFile ArbiterFile::create() const {
  LockedFile file(path_, true);
  if (!file.is_open()) {
    refuse(file, "; give a directory that is there and in which this user may write");
  }
  try {
    if (file.failed() != nullptr) refuse(file, "");
    Record none;
    write(file, none);
  } catch (...) {  // the next attempt must not find a file that holds nothing
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
    throw;
  }
  return file;
}

void ArbiterFile::check_locked() const {
  const LockedFile file(path_, false);
  if (file.busy()) return;
  if (file.failed() != nullptr) refuse(file, kWhereShared);
  refuse(
      "could be locked while rank 0 has it locked, so two halves could both go on; use a file "
      "system "
      "that shares its locks between hosts (NFS 4, without the options nolock and local_lock)");
}

void ArbiterFile::check_there() const {
  const LockedFile file(path_, false);
  if (file.failed() != nullptr && !file.busy()) refuse(file, kWhereShared);
}

ArbiterFile::Record ArbiterFile::read(LockedFile& file) const {
  const std::string text = file.read(sizeof(Record) + 1);
  if (file.failed() != nullptr) refuse(file, kWhereShared);
  Record record;
  bool sound = text.size() == sizeof record;
  if (sound) {
    std::memcpy(static_cast<void*>(&record), text.data(), sizeof record);
    sound = record.sound(Member::Seats::first(ranks_));
  }
  if (!sound) refuse("is damaged: it does not hold what a rank of this group wrote");
  return record;
}

void ArbiterFile::write(LockedFile& file, Record& record) const {
  record.sum = record.sum_now();
  file.write({reinterpret_cast<const char*>(&record), sizeof record});
  if (file.failed() != nullptr) refuse(file, "");
}

ArbiterFile::Said ArbiterFile::decide(const Said& asked) const {
  LockedFile file(path_, false);
  Record record = read(file);
  record.said = Member::arbitrate(record.said, asked);
  write(file, record);  // also what was there: an earlier write may not have reached the disk
  return record.said;
}

void ArbiterFile::leave(const Member::Seats& view) const {
  std::optional<LockedFile> file;
  for (int tries = 0; tries < 1000; ++tries) {  // often all leave at once
    file.emplace(path_, false);
    if (!file->busy()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Record record = read(*file);
  record.gone.add(rank_);
  if (!record.gone.contains(view)) return write(*file, record);
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

std::optional<Arbiter::Said> Arbiter::ask(const Said& asked) {
  if (!answer_.valid()) answer_ = Aside<Said>([decide = decide_, asked] { return decide(asked); });
  if (!answer_.ready_in(std::chrono::seconds(0))) return std::nullopt;
  return answer_.get();
}

}  // namespace ferry::engine
