#include "ferry/error.hpp"

#include <utility>

namespace ferry {

const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument: return "invalid argument";
    case ErrorKind::mismatch: return "mismatch";
    case ErrorKind::deadline: return "deadline";
    case ErrorKind::peer_failed: return "peer failed";
    case ErrorKind::peer_left: return "peer left";
    case ErrorKind::evicted: return "left behind";
    case ErrorKind::refused: return "refused";
    case ErrorKind::interrupted: return "interrupted";
    case ErrorKind::destroyed: return "destroyed";
    case ErrorKind::exhausted: return "exhausted";
    case ErrorKind::unsupported: return "unsupported";
    case ErrorKind::system: return "system";
  }
  return "unknown";
}

Error::Error(ErrorKind kind, const std::string& message, ErrorContext context)
    : std::runtime_error(message), kind_(kind), context_(std::move(context)) {}

}  // namespace ferry
