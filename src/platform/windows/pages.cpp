#include "platform/pages.hpp"

#include <cerrno>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "platform/process.hpp"
#include "platform/windows/system.hpp"

namespace ferry {
namespace {

constexpr int kTries = 64;

/// Which sections this process has mapped, and the names that it has made. Kept to its end.
struct Sections {
  struct View {
    std::size_t bytes = 0;
    std::uint64_t section = 0;
  };
  std::shared_mutex mutex{};
  std::map<std::uintptr_t, View> views{};  // by address
  std::map<std::string, HANDLE> names{};

  static Sections& all() {
    static auto& made = *new Sections;
    return made;
  }
};

/// "/ferry-..." to "Local\ferry-...": of the session.
std::string object_path(const std::string& name) {
  return "Local\\" + name.substr(name.starts_with('/') ? 1 : 0);
}

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  a = (a ^ (b + 0x9e3779b97f4a7c15)) * 0xbf58476d1ce4e5b9;
  a = (a ^ (a >> 27)) * 0x94d049bb133111eb;
  return (a ^ (a >> 31)) | 1;
}

std::byte* map_section(HANDLE section, std::size_t bytes, SectionAccess access, std::uint64_t id,
                       SectionFailure& failure) {
  const DWORD rights =
      access == SectionAccess::write ? FILE_MAP_READ | FILE_MAP_WRITE : FILE_MAP_READ;
  void* const at = MapViewOfFile(section, rights, 0, 0, 0);
  if (at == nullptr) {
    failure = {.call = "mmap", .error = windows::errno_of(GetLastError())};
    return nullptr;
  }
  MEMORY_BASIC_INFORMATION info{};
  VirtualQuery(at, &info, sizeof info);
  if (info.RegionSize < bytes) {
    UnmapViewOfFile(at);
    failure.has = info.RegionSize;
    return nullptr;
  }
  auto& all = Sections::all();
  std::unique_lock lock(all.mutex);
  all.views[reinterpret_cast<std::uintptr_t>(at)] = {info.RegionSize, id};
  return static_cast<std::byte*>(at);
}

}  // namespace

std::uint64_t windows::key_of(const void* word) noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(word);
  auto& all = Sections::all();
  std::shared_lock lock(all.mutex);
  auto after = all.views.upper_bound(at);
  if (after != all.views.begin()) {
    const auto& [start, view] = *--after;
    if (at - start < view.bytes) return mix(view.section, at - start);
  }
  return mix(static_cast<std::uint64_t>(process_id()) << 48, at);
}

std::byte* private_pages(std::size_t bytes, std::size_t alignment, int& error) noexcept {
  // Part of a reservation cannot be given back: so a place is looked for, and taken anew.
  for (int i = 0; i < kTries; ++i) {
    auto* place = static_cast<std::byte*>(
        VirtualAlloc(nullptr, bytes + alignment, MEM_RESERVE, PAGE_NOACCESS));
    if (place == nullptr) break;
    const auto start = reinterpret_cast<std::uintptr_t>(place);
    VirtualFree(place, 0, MEM_RELEASE);
    auto* const wanted = reinterpret_cast<void*>((start + alignment - 1) / alignment * alignment);
    void* const got = VirtualAlloc(wanted, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
    if (got != nullptr) {
      error = 0;
      return static_cast<std::byte*>(got);
    }
    if (GetLastError() != ERROR_INVALID_ADDRESS) break;  // another thread had it meanwhile
  }
  error = windows::errno_of(GetLastError());
  return nullptr;
}

void unmap_pages(std::byte* data, std::size_t /*bytes*/) noexcept {
  auto& all = Sections::all();
  {
    std::unique_lock lock(all.mutex);
    if (all.views.erase(reinterpret_cast<std::uintptr_t>(data)) == 0) {
      VirtualFree(data, 0, MEM_RELEASE);
      return;
    }
  }
  UnmapViewOfFile(data);
}

// A section's memory goes with the last process that has it.
void release_pages(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}

void populate_pages(std::byte* /*data*/, std::size_t /*bytes*/) noexcept {}

Section make_section(const std::string& name, std::size_t bytes, SectionFailure& failure) {
  Section section;
  section.inode = windows::hash_of(name);
  HANDLE made = CreateFileMappingA(INVALID_HANDLE_VALUE, nullptr, PAGE_READWRITE,
                                   static_cast<DWORD>(std::uint64_t{bytes} >> 32),
                                   static_cast<DWORD>(bytes), object_path(name).c_str());
  const DWORD error = GetLastError();
  section.descriptor = UniqueDescriptor(windows::number_of(made));
  if (made == nullptr || error == ERROR_ALREADY_EXISTS) {
    failure = {.call = "CreateFileMapping", .error = windows::errno_of(error)};
    return {};
  }
  section.data = map_section(made, bytes, SectionAccess::write, section.inode, failure);
  HANDLE kept = nullptr;
  if (section.data == nullptr) return {};
  if (!DuplicateHandle(GetCurrentProcess(), made, GetCurrentProcess(), &kept, 0, FALSE,
                       DUPLICATE_SAME_ACCESS)) {
    failure = {.call = "DuplicateHandle", .error = windows::errno_of(GetLastError())};
    unmap_pages(section.data, bytes);
    return {};
  }
  // The name lasts as long as a handle does.
  auto& all = Sections::all();
  std::unique_lock lock(all.mutex);
  all.names[name] = kept;
  return section;
}

Section open_section(const std::string& name, std::size_t bytes, SectionAccess access,
                     std::optional<std::uint64_t> inode, SectionFailure& failure) {
  Section section;
  section.inode = windows::hash_of(name);
  const DWORD rights =
      access == SectionAccess::write ? FILE_MAP_READ | FILE_MAP_WRITE : FILE_MAP_READ;
  HANDLE opened = OpenFileMappingA(rights, FALSE, object_path(name).c_str());
  if (opened == nullptr) {
    failure = {.call = "OpenFileMapping", .error = windows::errno_of(GetLastError())};
  } else if (inode && *inode != section.inode) {
    failure.foreign = true;
  } else {
    section.data = map_section(opened, bytes, access, section.inode, failure);
  }
  if (opened != nullptr) CloseHandle(opened);
  return section;
}

Section open_section_of(std::int64_t pid, int descriptor, std::size_t bytes, std::uint64_t inode,
                        SectionFailure& failure) {
  Section section;
  section.inode = inode;
  HANDLE owner = OpenProcess(PROCESS_DUP_HANDLE, FALSE, static_cast<DWORD>(pid));
  HANDLE copy = nullptr;
  if (owner == nullptr ||
      !DuplicateHandle(owner, windows::handle_of(descriptor), GetCurrentProcess(), &copy, 0, FALSE,
                       DUPLICATE_SAME_ACCESS)) {
    failure = {.call = "DuplicateHandle", .error = windows::errno_of(GetLastError())};
  } else {
    section.data = map_section(copy, bytes, SectionAccess::write, inode, failure);
  }
  if (copy != nullptr) CloseHandle(copy);
  if (owner != nullptr) CloseHandle(owner);
  return section;
}

void remove_section(const std::string& name) noexcept {
  auto& all = Sections::all();
  std::unique_lock lock(all.mutex);
  const auto found = all.names.find(name);
  if (found == all.names.end()) return;
  CloseHandle(found->second);
  all.names.erase(found);
}

bool section_exists(const std::string& name) {
  HANDLE opened = OpenFileMappingA(FILE_MAP_READ, FALSE, object_path(name).c_str());
  if (opened != nullptr) CloseHandle(opened);
  return opened != nullptr;
}

// The session's names cannot be listed by documented calls.
std::optional<std::vector<std::string>> list_sections(const std::string& /*prefix*/, int& error) {
  error = ENOTSUP;
  return std::nullopt;
}

bool means_no_room(int error) noexcept {
  return error == ENOSPC || error == ENOMEM;
}

std::optional<std::size_t> free_section_bytes() {
  return std::nullopt;
}

}  // namespace ferry
