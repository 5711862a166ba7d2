#include "fabric/domains/shared_doors.hpp"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ferry/error.hpp>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/text.hpp"
#include "fabric/shm/door.hpp"
#include "fabric/shm/names.hpp"
#include "platform/host.hpp"
#include "platform/locked_file.hpp"
#include "platform/owned_file.hpp"

namespace ferry::fabric {
namespace {

constexpr std::uint64_t kSharedDoorMagic = 0x32524f'4f445952;  // "RYDOOR2"
constexpr std::size_t kMostBytes = std::size_t{64} << 10;
constexpr std::size_t kMostOfPathShown = 200;
constexpr const char* kMayWrite =
    "; the directory (arbiter) must be one in which this user may write";
constexpr unsigned kOthers = 077;  // permissions of other users

/// What a file begins with; text, invitation and card follow.
struct Head {
  std::uint64_t magic = kSharedDoorMagic;
  std::uint64_t sum = 0;  // of what follows
  JobKey group{};
  std::uint64_t ticket = 0;
  std::int64_t rank = 0;
  std::uint64_t begun = 0;
  std::uint64_t text = 0, invitation = 0, card = 0;  // bytes
};

std::string digits(const JobKey& key) {
  std::string text;
  for (const std::uint64_t word : key) {
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  }
  return text;
}

std::uint64_t sum_of(const std::string& bytes) {
  std::uint64_t sum = bytes.size();
  for (std::size_t at = offsetof(Head, group); at < bytes.size(); at += sizeof sum) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof word, bytes.size() - at));
    sum = siphash({kSharedDoorMagic, at}, word, sum);
  }
  return sum;
}

std::string to_text(const SharedDoor& door) {
  const Visitor& there = door.there;
  Head head{.group = door.group,
            .ticket = there.ticket,
            .rank = there.rank,
            .begun = there.begun ? 1u : 0u,
            .text = there.text.size(),
            .invitation = there.invitation.size(),
            .card = there.card.size()};
  std::string bytes(sizeof head, '\0');
  bytes += there.text;
  bytes.append(reinterpret_cast<const char*>(there.invitation.data()), there.invitation.size());
  bytes.append(reinterpret_cast<const char*>(there.card.data()), there.card.size());
  std::memcpy(bytes.data(), &head, sizeof head);
  head.sum = sum_of(bytes);
  std::memcpy(bytes.data(), &head, sizeof head);
  return bytes;
}

std::optional<SharedDoor> door_in(const std::string& bytes, int rank) {
  Head head;
  if (bytes.size() < sizeof head || bytes.size() > kMostBytes) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.magic != kSharedDoorMagic || head.rank != rank || head.sum != sum_of(bytes))
    return std::nullopt;
  std::span<const char> rest(bytes.data() + sizeof head, bytes.size() - sizeof head);
  bool whole = true;
  const auto take = [&](std::uint64_t count) {
    whole = whole && count <= rest.size();
    const auto taken = rest.first(whole ? count : 0);
    rest = rest.subspan(taken.size());
    return taken;
  };
  const auto bytes_in = [](std::span<const char> text) {
    const auto all = std::as_bytes(text);
    return std::vector<std::byte>(all.begin(), all.end());
  };
  SharedDoor door{.group = head.group, .there = {.rank = rank, .ticket = head.ticket}};
  const auto text = take(head.text);
  door.there.text.assign(text.begin(), text.end());
  door.there.invitation = bytes_in(take(head.invitation));
  door.there.card = bytes_in(take(head.card));
  door.there.begun = head.begun != 0;
  if (!whole || !rest.empty()) return std::nullopt;
  return door;
}

}  // namespace

TurnToBegin::TurnToBegin(std::string path, int rank) : path_(std::move(path)), file_(path_, true) {
  while (file_.error() == EEXIST || file_.gone()) {
    file_ = LockedFile(path_, false);
    if (file_.error() == ENOENT) file_ = LockedFile(path_, true);
  }
  if (file_.failed() == nullptr) return;
  const std::string start = "Group: rank " + std::to_string(rank) + " wants to begin alone, but ";
  if (file_.busy()) {
    throw Error(ErrorKind::refused,
                start + "another process begins a group of that name at this moment; join it",
                {.rank = rank});
  }
  throw Error(ErrorKind::system,
              start + "the file " + printable(path_, kMostOfPathShown) +
                  ", which keeps others from it, could not be " + file_.failed() + ": " +
                  std::generic_category().message(file_.error()) + kMayWrite,
              {.rank = rank});
}

TurnToBegin::~TurnToBegin() {
  if (file_.failed() != nullptr || !file_.is_open()) return;
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);  // while it is locked: the next one is another file
}

SharedDoors::SharedDoors(std::string directory, const LobbyName& lobby, int rank, int ranks)
    : start_(std::move(directory) + "/ferry-door-" + digits(door_key(lobby)) + "-"),
      rank_(rank),
      ranks_(ranks) {}

std::string SharedDoors::path_of(int rank) const {
  return start_ + std::to_string(rank);
}

void SharedDoors::clear() const {
  for (int rank = 0; rank < ranks_; ++rank) {
    std::error_code ignored;
    std::filesystem::remove(path_of(rank), ignored);
  }
}

void SharedDoors::show(const SharedDoor& own) const {
  const std::string path = path_of(rank_);
  const std::string fresh = path + "." + digits(random_key(rank_));
  std::string failed;
  {
    LockedFile file(fresh, true);
    file.write(to_text(own));
    if (file.failed() != nullptr) {
      failed = std::string(file.failed()) + ": " + std::generic_category().message(file.error());
    }
  }
  std::error_code error;
  if (failed.empty()) std::filesystem::rename(fresh, path, error);
  if (error) failed = "renamed: " + error.message();
  if (failed.empty()) return;
  std::filesystem::remove(fresh, error);
  throw Error(
      ErrorKind::system,
      "rank " + std::to_string(rank_) + ": elastic: the file " + printable(path, kMostOfPathShown) +
          ", by which processes of other hosts find the group, could not be " + failed + kMayWrite,
      {.rank = rank_});
}

void SharedDoors::leave(std::span<const int> lost) const {
  std::error_code ignored;
  std::filesystem::remove(path_of(rank_), ignored);
  for (const int rank : lost) std::filesystem::remove(path_of(rank), ignored);
}

std::vector<SharedDoor> SharedDoors::list(bool own) const {
  std::vector<SharedDoor> all;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_ && !own) continue;
    if (auto door = read(rank)) all.push_back(std::move(*door));
  }
  return all;
}

std::optional<SharedDoor> SharedDoors::read(int rank) const {
  const FileRead file = read_owned_file(path_of(rank), kMostBytes + 1);
  const bool own = file.failed == nullptr && file.kind == nullptr && file.owner == user_id() &&
                   (file.mode & kOthers) == 0;
  return own ? door_in(file.text, rank) : std::nullopt;
}

}  // namespace ferry::fabric
