// WaitOnAddress wakes threads of its own process alone. So here each thread that sleeps has a place
// in a table that all processes of a user and session share, and an event of its own: the place
// says which word the thread sleeps on, and who changes a word sets the events of its sleepers.
#include "platform/futex.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <string>

#include "platform/host.hpp"
#include "platform/process.hpp"
#include "platform/windows/system.hpp"

namespace ferry {
namespace {

constexpr std::size_t kPlaces = 1024;

/// Zeroed at first.
struct Place {
  std::atomic<std::uint64_t> owner;  // process id; 0: free
  std::atomic<std::uint64_t> key;    // of the word; 0: its thread does not sleep
};
struct Table {
  std::atomic<std::uint64_t> used;  // no place from here on was ever taken
  std::array<Place, kPlaces> places;
};

/// Kept to the end of the process.
class Sleepers {
 public:
  static Sleepers& all() {
    static auto& made = *new Sleepers;
    return made;
  }

  /// Null: the table could not be made.
  Table* table() const { return table_; }

  HANDLE event(std::size_t index) {
    HANDLE known = events_[index].load(std::memory_order_acquire);
    if (known != nullptr) return known;
    const std::string name = prefix_ + "-" + std::to_string(index);
    HANDLE made = CreateEventA(nullptr, FALSE, FALSE, name.c_str());
    if (made != nullptr && !events_[index].compare_exchange_strong(known, made)) {
      CloseHandle(made);
      made = known;
    }
    return made;
  }

  /// A place for this thread, or kPlaces.
  std::size_t take() {
    const auto self = static_cast<std::uint64_t>(process_id());
    for (std::size_t i = 0; table_ != nullptr && i < kPlaces; ++i) {
      std::uint64_t owner = table_->places[i].owner.load();
      if (owner != 0 && (owner == self || !has_ended(owner))) continue;
      if (!table_->places[i].owner.compare_exchange_strong(owner, self)) continue;
      table_->places[i].key.store(0);
      std::uint64_t used = table_->used.load();
      while (used <= i && !table_->used.compare_exchange_weak(used, i + 1)) {
      }
      if (event(i) != nullptr) return i;
      table_->places[i].owner.store(0);
      break;
    }
    return kPlaces;
  }

  template <class Which>
  void wake(Which which) {
    if (table_ == nullptr) return;
    const std::size_t used = std::min<std::size_t>(table_->used.load(), kPlaces);
    for (std::size_t i = 0; i < used; ++i) {
      if (!which(table_->places[i])) continue;
      if (HANDLE sleeper = event(i)) SetEvent(sleeper);
    }
  }

 private:
  Sleepers() {
    char name[64];
    std::snprintf(name, sizeof name, "Local\\ferry-sleepers-%016llx",
                  static_cast<unsigned long long>(user_id()));
    prefix_ = name;
    // Never closed: while a process of the user runs, all see one table.
    HANDLE section =
        CreateFileMappingA(INVALID_HANDLE_VALUE, nullptr, PAGE_READWRITE, 0, sizeof(Table), name);
    if (section == nullptr) return;
    table_ = static_cast<Table*>(MapViewOfFile(section, FILE_MAP_ALL_ACCESS, 0, 0, sizeof(Table)));
  }

  static bool has_ended(std::uint64_t pid) {
    HANDLE process = OpenProcess(SYNCHRONIZE, FALSE, static_cast<DWORD>(pid));
    if (process == nullptr) return GetLastError() == ERROR_INVALID_PARAMETER;
    const bool ended = WaitForSingleObject(process, 0) == WAIT_OBJECT_0;
    CloseHandle(process);
    return ended;
  }

  std::string prefix_{};
  Table* table_ = nullptr;
  std::array<std::atomic<HANDLE>, kPlaces> events_{};
};

/// This thread's place until it ends, or kPlaces. Not thread_local: g++ for Windows may free such a
/// variable's memory before its destructor runs.
std::size_t own_place() {
  static const DWORD slot = FlsAlloc([](void* taken) {
    const auto index = reinterpret_cast<std::uintptr_t>(taken) - 1;
    if (index < kPlaces) Sleepers::all().table()->places[index].owner.store(0);
  });
  if (slot == FLS_OUT_OF_INDEXES) return kPlaces;
  if (void* const taken = FlsGetValue(slot)) return reinterpret_cast<std::uintptr_t>(taken) - 1;
  const std::size_t index = Sleepers::all().take();
  FlsSetValue(slot, reinterpret_cast<void*>(index + 1));
  return index;
}

}  // namespace

void futex_wait(const std::uint64_t* word, std::uint64_t seen, std::uint64_t nanoseconds) noexcept {
  const std::size_t own = own_place();
  const auto slice =
      static_cast<DWORD>(std::min<std::uint64_t>((nanoseconds + 999'999) / 1'000'000, 60'000));
  if (own >= kPlaces) {  // nobody can wake it
    Sleep(std::min<DWORD>(slice, 1));
    return;
  }
  Place& place = Sleepers::all().table()->places[own];
  // In one total order with what the waker does: either this finds the word changed, or the waker
  // finds this place with the word's key. An event that is set too often ends a later sleep early.
  place.key.store(windows::key_of(word));
  const std::uint64_t now =
      std::atomic_ref(*const_cast<std::uint64_t*>(word)).load(std::memory_order_seq_cst);
  if (static_cast<std::uint32_t>(now) == static_cast<std::uint32_t>(seen)) {
    WaitForSingleObject(Sleepers::all().event(own), slice);
  }
  place.key.store(0);
}

void futex_wake(const std::uint64_t* word) noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const std::uint64_t key = windows::key_of(word);
  Sleepers::all().wake([&](const Place& place) { return place.key.load() == key; });
}

void wake_sleepers() noexcept {
  const auto self = static_cast<std::uint64_t>(process_id());
  Sleepers::all().wake(
      [&](const Place& place) { return place.owner.load() == self && place.key.load() != 0; });
}

}  // namespace ferry
