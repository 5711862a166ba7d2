// Pages of memory: private ones, and sections that processes share by name (objects in /dev/shm;
// Windows: sections backed by the page file).
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "platform/unique_descriptor.hpp"

namespace ferry {

/// Zeroed memory of this process, aligned so (a multiple of a page); untouched pages take no
/// memory. Huge pages are asked for behind the first 4 MiB, of more than 8. Null: `error` says why.
std::byte* private_pages(std::size_t bytes, std::size_t alignment, int& error) noexcept;
/// Of private pages, or of a section's mapping: all of it.
void unmap_pages(std::byte* data, std::size_t bytes) noexcept;
/// Gives the memory behind a section's mapping back, for all processes. Only advice.
void release_pages(std::byte* data, std::size_t bytes) noexcept;
/// Fills in the page tables of a section's mapping now. Only speed.
void populate_pages(std::byte* data, std::size_t bytes) noexcept;

/// A mapped section.
struct Section {
  std::byte* data = nullptr;      ///< null: none
  std::uint64_t inode = 0;        ///< tells it from a later one of the same name; 0 on Windows
  UniqueDescriptor descriptor{};  ///< of the one that made it
};

/// What kept a section from being made or opened.
struct SectionFailure {
  const char* call = nullptr;  ///< null: nothing did; the system's call that failed
  int error = 0;               ///< its errno
  bool foreign = false;        ///< not a section of this user alone, or another than expected
  std::optional<std::uint64_t> has{};  ///< it is too small: its bytes
};

/// Made, zeroed, of this user alone, with all its memory reserved, and mapped. After a failure the
/// name is gone again.
Section make_section(const std::string& name, std::size_t bytes, SectionFailure& failure);

enum class SectionAccess { read, write };
/// Maps another process's, after checking that it is this user's alone and large enough. `inode`,
/// where it is known: that it is this one.
Section open_section(const std::string& name, std::size_t bytes, SectionAccess access,
                     std::optional<std::uint64_t> inode, SectionFailure& failure);
/// The same of a section without a name: what that process has open as `descriptor`.
Section open_section_of(std::int64_t pid, int descriptor, std::size_t bytes, std::uint64_t inode,
                        SectionFailure& failure);

/// Takes the name away; mappings stay. On Windows only the process that made it can, and what a
/// process made goes with it.
void remove_section(const std::string& name) noexcept;
/// Whether there is a section of that name, or something else, of whatever user.
bool section_exists(const std::string& name);

/// Names (without a leading slash) that begin so, of sections of this user. Nothing: `error` says
/// why they cannot be listed.
std::optional<std::vector<std::string>> list_sections(const std::string& prefix, int& error);
/// Whether an errno says that there is no memory for a section.
bool means_no_room(int error) noexcept;
/// Bytes that are left for sections; nothing where they have no limit of their own.
std::optional<std::size_t> free_section_bytes();

}  // namespace ferry
