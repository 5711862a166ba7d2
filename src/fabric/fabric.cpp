#include "fabric/fabric.hpp"

#include <ferry/error.hpp>
#include <string>
#include <thread>

namespace ferry::fabric {

Segment Fabric::adopt(const Segment& segment) {
  throw Error(ErrorKind::unsupported,
              "rank " + std::to_string(rank()) + ": fabric " + std::string(name()) +
                  " registers memory of its own alone, not segment " + std::to_string(segment.id) +
                  " of another fabric",
              {.rank = rank()});
}

bool proves_end(const Place& former, const Place& now) {
  if (former.kernel.empty() || now.kernel.empty()) return false;
  if (former.kernel == now.kernel) return former.processes == now.processes;
  return !now.address.empty() && former.address == now.address;
}

void Fabric::put_pieces(int peer, Address to, std::span<const Piece> pieces, std::uint64_t tag) {
  std::vector<std::byte> whole;
  for (const Piece& piece : pieces) {
    const auto* first = static_cast<const std::byte*>(piece.data);
    whole.insert(whole.end(), first, first + piece.bytes);
  }
  put(peer, to, whole.data(), whole.size(), tag);
}

std::chrono::nanoseconds Fabric::spin_time() const noexcept {
  return std::chrono::microseconds(shares_cores() ? 50 : 20);
}

bool Fabric::progress() noexcept {
  // A rank that shares this core may be the one that is awaited; to wake it from a sleep takes
  // longer than to let it run.
  if (shares_cores()) std::this_thread::yield();
  return false;
}

bool Fabric::shares_cores() const noexcept {
  static const unsigned cores = std::thread::hardware_concurrency();
  return static_cast<unsigned>(size()) > cores;
}

}  // namespace ferry::fabric
