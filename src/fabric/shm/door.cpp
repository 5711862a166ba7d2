#include "fabric/shm/door.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ferry/error.hpp>
#include <string_view>
#include <thread>
#include <utility>

#include "base/open_files.hpp"
#include "fabric/shm/names.hpp"
#include "platform/pages.hpp"

namespace ferry::fabric {
namespace {

using namespace std::chrono_literals;

std::uint64_t load(const std::uint64_t& word) {
  // Acquire: what its owner wrote before is seen.
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}

void store(std::uint64_t& word, std::uint64_t value) {
  // Release: see above.
  std::atomic_ref(word).store(value, std::memory_order_release);
}

std::vector<std::byte> bytes_in(const DoorPage::Bytes& bytes) {
  const auto count = std::min<std::size_t>(load(bytes.count), bytes.data.size());
  return {bytes.data.begin(), bytes.data.begin() + static_cast<std::ptrdiff_t>(count)};
}

/// The part of an object's name that does not say whose it is.
std::string digits_of(const std::string& name) {
  return name.substr(name.rfind('-'));
}

}  // namespace

JobKey door_key(const LobbyName& name) {
  JobKey key{0x6665727279, 0x646f6f72};
  const std::string lobby = name.key.empty() ? name.text : name.text + '\0' + name.key;
  for (std::size_t at = 0; at <= lobby.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, lobby.data() + at, std::min(sizeof word, lobby.size() - at));
    key = {siphash(key, word, lobby.size()), siphash(key, word, ~std::uint64_t{lobby.size()})};
  }
  return key;
}

OwnDoor::OwnDoor(const What& what, const std::string& text)
    : owner_pid_(process_id()), rank_(what.rank) {
  if (text.size() > DoorPage::kTextBytes) {
    throw Error(ErrorKind::invalid_argument,
                "Group: elastic: the configuration has " + std::to_string(text.size()) +
                    " bytes as text, expected at most " + std::to_string(DoorPage::kTextBytes),
                {.rank = what.rank});
  }
  const ProcessName owner = this_process();
  name_ = object_name(what.door, owner, what.rank, 0);
  try {
    object_ = create_object(name_, sizeof(DoorPage), what.rank);
  } catch (...) {
    name_.clear();
    throw;
  }
  DoorPage& mine = page();
  mine.owner = owner;
  mine.key = what.group;
  mine.ticket = what.ticket;
  mine.begun = what.begun ? 1 : 0;
  mine.text_bytes = text.size();
  std::memcpy(mine.text.data(), text.data(), text.size());
  write(mine.invitation, what.invitation);
  store(mine.magic, DoorPage::kMagic);
}

void OwnDoor::add(SegmentId id, std::size_t bytes, SharedObject& object) {
  kept_.push_back(std::move(object.descriptor));
  page().segment[id] = {kept_.back().get(), bytes, object.inode};
  store(page().segments, id + 1);
}

void OwnDoor::show(std::span<const std::byte> card) {
  write(page().card, card);
}

void OwnDoor::write(DoorPage::Bytes& to, std::span<const std::byte> bytes) const {
  if (bytes.size() > to.data.size()) {
    throw Error(ErrorKind::exhausted,
                "rank " + std::to_string(rank_) + ": elastic: what it says of its network has " +
                    std::to_string(bytes.size()) + " bytes, expected at most " +
                    std::to_string(to.data.size()) + "; use fewer NICs (FERRY_OFI_NICS_PER_RANK)",
                {.rank = rank_});
  }
  std::copy(bytes.begin(), bytes.end(), to.data.begin());
  store(to.count, bytes.size());
}

void OwnDoor::close() noexcept {
  if (name_.empty() || process_id() != owner_pid_) return;  // of a forked child: its parent's
  // Once: this process may have opened another one under that name since.
  if (std::atomic_ref(page().closed).exchange(1) == 0) remove_section(name_);
}

std::string Door::text() const {
  return {page_.text.data(), std::min<std::size_t>(page_.text_bytes, DoorPage::kTextBytes)};
}

std::vector<std::byte> Door::invitation() const {
  return bytes_in(page_.invitation);
}

std::vector<std::byte> Door::card() const {
  return bytes_in(page_.card);
}

bool Door::ends_soon() {
  // A process that ends closes its files before the kernel says that it has ended.
  for (int i = 0; i < 200 && !ended(); ++i) std::this_thread::sleep_for(5ms);
  return ended();
}

bool Door::closed() const {
  return load(page_.closed) != 0;
}

bool Door::open() {
  return !closed() && !ended();
}

SegmentId Door::segments() const {
  return static_cast<SegmentId>(std::min<std::uint64_t>(load(page_.segments), kMaxSegments));
}

std::shared_ptr<Memory> Door::map(SegmentId id) const {
  const DoorPage::Segment& segment = page_.segment[id];
  const Attachment attachment{Wire::shm, self_, rank_, id, segment.bytes, {}};
  return open_descriptor(page_.owner.pid, static_cast<int>(segment.descriptor), attachment,
                         segment.inode);
}

const std::shared_ptr<Memory>& Door::control() {
  if (!control_) control_ = map(0);
  return control_;
}

Doors::Doors(const JobKey& key, int self, int ranks) : key_(key), self_(self), ranks_(ranks) {
  int error = 0;
  if (list_sections(std::string(kObjectPrefix), error) || error != ENOTSUP) return;
  throw Error(ErrorKind::unsupported,
              "rank " + std::to_string(self) +
                  ": elastic is set, but this system does not list shared memory, where joining "
                  "processes would find the group; elastic groups need Linux",
              {.rank = self, .peer = self});
}

std::vector<std::shared_ptr<Door>> Doors::list() {
  const ProcessName self = this_process();
  std::vector<std::string> digits;
  for (int rank = 0; rank < ranks_; ++rank) {
    digits.push_back(digits_of(object_name(key_, self, rank, 0)));
  }
  int error = 0;
  const auto names = list_sections(std::string(kObjectPrefix), error);
  if (!names) {
    throw Error(ErrorKind::system,
                "rank " + std::to_string(self_) + " cannot list /dev/shm: " + error_text(error),
                {.rank = self_});
  }
  decltype(known_) now;
  std::vector<std::shared_ptr<Door>> open_now;
  for (const std::string& name : *names) {
    const auto owner = owner_of(name);
    if (!owner || owner->pid_namespace != self.pid_namespace) continue;
    const auto at = std::find(digits.begin(), digits.end(), digits_of(name));
    if (at == digits.end()) continue;
    const int rank = static_cast<int>(at - digits.begin());
    if (rank == self_ && owner->pid == self.pid) continue;
    // A closed one may have been made anew by the same process.
    const auto same = [&](const auto& known) {
      return known.first == name && !known.second->closed();
    };
    const auto known = std::find_if(known_.begin(), known_.end(), same);
    auto door = known != known_.end() ? known->second : open("/" + name, rank);
    if (!door) continue;
    now.emplace_back(name, door);
    if (door->open() && door->segments() > 0) open_now.push_back(std::move(door));
  }
  known_ = std::move(now);
  return open_now;
}

std::shared_ptr<Door> Doors::open(const std::string& name, int rank) const {
  const std::size_t bytes = whole_pages(sizeof(DoorPage), self_);
  SectionFailure failure;
  const Section section = open_section(name, bytes, SectionAccess::read, std::nullopt, failure);
  if (section.data == nullptr) {
    const bool short_of = too_many_files(failure.error) || failure.error == ENOMEM;
    const bool mapping = failure.call != nullptr && failure.call == std::string_view("mmap");
    if (!short_of && !mapping) return nullptr;  // gone, foreign, or not finished yet
    throw Error(ErrorKind::system,
                "rank " + std::to_string(self_) + ": " + failure.call + " " + name + ": " +
                    error_text(failure.error),
                {.rank = self_, .peer = rank});
  }
  auto memory = std::make_shared<Memory>(section.data, bytes);
  const auto& page = *reinterpret_cast<const DoorPage*>(memory->data());
  const auto owner = owner_of(std::string_view(name).substr(1));
  const bool made = load(page.magic) == DoorPage::kMagic && owner && page.owner.pid == owner->pid &&
                    page.owner.start_time == owner->start_time;
  if (!made) return nullptr;  // not finished yet
  return std::make_shared<Door>(self_, rank, page, std::move(memory));
}

}  // namespace ferry::fabric
