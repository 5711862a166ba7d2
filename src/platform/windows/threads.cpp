#include "platform/threads.hpp"

namespace ferry {

// There are no signals.
SignalsBlocked::SignalsBlocked() noexcept = default;
SignalsBlocked::~SignalsBlocked() = default;

// Threads keep the names that the system gives them.
void name_thread(std::thread& /*thread*/, const char* /*name*/) noexcept {}

}  // namespace ferry
