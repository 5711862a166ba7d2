// What the command does with processes on Windows alone.
#pragma once
#include <string>

#include "platform/child_process.hpp"

namespace ferry::windows {

/// This program anew, with its words or with `command_line`, unless empty, and a variable in its
/// environment; `silent`: with outputs that nobody reads. Throws std::system_error.
Process start_again(const std::string& command_line, const std::string& variable,
                    const std::string& value, bool silent);
/// Ends a process, or all that this process has started, with that code.
void end_process(const Process& process, unsigned code);
void end_started(unsigned code);
/// Ends this process at once.
[[noreturn]] void end_this_process(int code);

/// From now on outputs take bytes as they are, and Ctrl-C, which processes of this console hear
/// themselves, does not end this one but is counted.
void take_console();
int interrupts();

}  // namespace ferry::windows
