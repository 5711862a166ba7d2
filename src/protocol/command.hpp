// What a kernel asks a proxy to do on the network (protocol/command_ring.hpp): for kernels, which
// the ring's own header does not pass.
#pragma once

#include <cstdint>

namespace ferry::protocol {

struct Command {
  enum class Kind : std::uint64_t {
    none,
    begin,  ///< the stream has reached the call: peers may be asked for their windows
    put,    ///< `bytes` at `from` of the own stage go to `to` of window `window`
  };
  Kind kind = Kind::none;
  std::uint64_t window = 0;
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const Command&, const Command&) = default;
};

/// A slot of the ring; zero before the first use.
struct CommandSlot {
  std::uint64_t number = 0;    ///< of the command, plus 1; written last
  std::uint64_t sleepers = 0;  ///< the second word of that flag
  Command command{};
  std::uint64_t unused = 0;  ///< to a line of its own
};
static_assert(sizeof(CommandSlot) == 64);

}  // namespace ferry::protocol
