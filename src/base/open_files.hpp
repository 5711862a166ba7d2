// What to say when no file descriptor is left.
#pragma once
#include <cstdint>
#include <string>

namespace ferry {

/// Whether an errno says that this process (EMFILE) or the machine (ENFILE) has no descriptor left.
bool too_many_files(int error);

/// What an errno says; where descriptors are short, with the limit of this process (0: not known)
/// and what to do.
std::string error_text(int error, std::uint64_t files_limit);
/// The same with the limit that the system tells.
std::string error_text(int error);

}  // namespace ferry
