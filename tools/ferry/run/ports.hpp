// What a job is given that no other one has: ports, a secret, its place among hosts.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::cli {

/// A TCP port of the loopback interface that is free now, below the range from which the kernel
/// serves itself, and that no other `ferry` on this machine takes while this object lives.
class ReservedPort {
 public:
  /// Picks one. Throws std::runtime_error when none can be found.
  ReservedPort();
  /// Exactly this one. Throws std::runtime_error when somebody listens there; `advice`: what to do.
  explicit ReservedPort(std::uint16_t port, std::string_view advice =
                                                "choose another with --port, or leave --port "
                                                "out and a free one is found");
  std::uint16_t number() const { return port_; }

 private:
  std::uint16_t port_ = 0;
  std::shared_ptr<void> claim_;  // let go with the last copy
};

/// Which of the addresses (numbers or names) is this machine's. Throws std::runtime_error unless
/// exactly one is.
int own_place(const std::vector<std::string>& addresses);

/// 128 random bits in hexadecimal.
std::string random_secret();

}  // namespace ferry::cli
