// Limits that the system sets this process (ulimit).
#pragma once
#include <cstdint>
#include <optional>

namespace ferry {

enum class Limit { address_space, data, locked, file_size, open_files, threads, stack };

/// Nothing: there is none.
std::optional<std::uint64_t> limit_of(Limit which);

/// Bytes of address space that are taken; 0: not known.
std::uint64_t address_space_taken();

}  // namespace ferry
