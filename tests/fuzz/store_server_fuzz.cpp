// The store's state machine with any mix of strangers, honest ranks and ranks that hold the secret
// and break the protocol, in memory. Beside "no crash": the limits hold, a rank that got its parts
// got what was given, and nothing is left when all have gone.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "bootstrap/store_client.hpp"
#include "bootstrap/store_server.hpp"
#include "fuzz_input.hpp"

namespace {

using namespace ferry::bootstrap;
using ferry::fuzz::Input;

constexpr int kRanks = 3;
constexpr std::size_t kPendingAtMost = 6;

void check(bool good) {
  if (!good) std::abort();
}

struct Visitor {
  StoreServer::Connection id = 0;
  std::unique_ptr<StoreClient> client;  // none: a stranger who sends raw bytes
  int rank = -1;
  bool honest = true;
};

class World {
 public:
  World()
      : server_({.size = kRanks,
                 .secret = "secret",
                 .nonce = [this] { return next_nonce(); },
                 .pending_at_most = kPendingAtMost}) {}

  void step(Input& input);
  void end();

 private:
  Nonce next_nonce() {
    Nonce nonce{};
    nonce[0] = std::byte(nonces_);
    nonce[1] = std::byte(nonces_++ >> 8);
    return nonce;
  }
  void dial(Input& input);
  void act(Visitor& visitor, Input& input);
  void pump(Visitor& visitor, std::size_t piece);
  void check_parts(Visitor& visitor);
  static std::vector<std::byte> gift(int rank, std::uint64_t sequence) {
    return std::vector<std::byte>(std::size_t(rank) * 5 + sequence % 3, std::byte(rank + 1));
  }

  int nonces_ = 0;
  StoreServer server_;
  StoreServer::TimePoint now_{};
  std::vector<Visitor> visitors_;
  bool all_honest_ = true;
};

void World::dial(Input& input) {
  if (visitors_.size() >= 24) return;
  Visitor visitor;
  visitor.id = server_.open(now_);
  while (const auto oldest = server_.surplus()) server_.evict(*oldest);
  const std::uint8_t kind = input.byte();
  if (kind & 1) {
    visitor.rank = int(kind >> 1 & 3);
    const int size = kind & 16 ? kRanks + 1 : std::max(kRanks, visitor.rank + 1);
    visitor.client =
        std::make_unique<StoreClient>(StoreClient::Config{.rank = visitor.rank,
                                                          .size = size,
                                                          .secret = kind & 8 ? "guess" : "secret",
                                                          .nonce = next_nonce()});
  }
  visitors_.push_back(std::move(visitor));
}

void World::pump(Visitor& visitor, std::size_t piece) {
  if (visitor.client) {
    FrameQueue& up = visitor.client->output();
    for (int turn = 0; turn < 64 && !up.empty(); ++turn) {
      const auto bytes = up.front().first(std::min(piece, up.front().size()));
      server_.receive(visitor.id, bytes);
      up.written(bytes.size());
    }
  }
  for (int turn = 0; turn < 64; ++turn) {
    const auto out = server_.output(visitor.id);
    if (out.empty()) break;
    const std::vector<std::byte> bytes(out.begin(),
                                       out.begin() + std::ptrdiff_t(std::min(piece, out.size())));
    server_.written(visitor.id, bytes.size());
    if (visitor.client) visitor.client->receive(bytes);
  }
  check_parts(visitor);
}

void World::check_parts(Visitor& visitor) {
  if (!visitor.client || !visitor.honest || !visitor.client->complete()) return;
  const std::uint64_t sequence = visitor.client->sequence();
  const auto parts = visitor.client->take();
  if (!all_honest_) return;
  for (int r = 0; r < kRanks; ++r) check(parts[std::size_t(r)] == gift(r, sequence));
}

void World::act(Visitor& visitor, Input& input) {
  StoreClient* const client = visitor.client.get();
  const bool joined = client != nullptr && client->state() == StoreClient::State::joined;
  switch (input.below(8)) {
    case 0: {
      const auto bytes = input.piece(input.byte());
      if (client) visitor.honest = all_honest_ = false;
      return server_.receive(visitor.id, bytes);
    }
    case 1:
      // Bytes from nowhere reach the client, too.
      if (client) client->receive(input.piece(input.byte()));
      visitor.honest = false;
      return;
    case 2:
      if (joined && visitor.honest && client->arrived() == 0 && !client->absences()) {
        client->give(gift(visitor.rank, client->sequence()));
        client->ask();
      }
      return;
    case 3:
      if (joined) client->ask();
      return;
    case 4:
      if (joined) client->leave(Farewell(input.below(4)));
      return;
    case 5:
      if (joined) {  // holds the keys, and says anything at all
        visitor.honest = all_honest_ = false;
        const FrameHeader header{.type = FrameType(input.below(14)),
                                 .sequence = input.byte() & 3u,
                                 .rank = input.byte() & 3u};
        const auto payload = input.piece(input.byte() & 63u);
        client->output().push(header, std::vector<std::byte>(payload.begin(), payload.end()));
      }
      return;
    case 6: server_.end_of_stream(visitor.id); return;
    default: server_.forget(visitor.id);
  }
}

void World::step(Input& input) {
  const std::uint8_t op = input.byte();
  if (op < 48) {
    dial(input);
  } else if (op < 64) {
    now_ += std::chrono::milliseconds(input.byte() * 40);
    server_.tick(now_);
  } else if (op == 64) {
    server_.close();
  } else if (!visitors_.empty()) {
    Visitor& visitor = visitors_[input.below(visitors_.size())];
    if (op & 1) {
      act(visitor, input);
    } else {
      pump(visitor, 1 + input.byte());
    }
  }
  check(server_.pending() <= 2 * kPendingAtMost);
}

void World::end() {
  for (int turn = 0; turn < 3; ++turn) {
    for (Visitor& visitor : visitors_) pump(visitor, 4096);
  }
  server_.close();
  for (Visitor& visitor : visitors_) pump(visitor, 4096);
  for (Visitor& visitor : visitors_) server_.forget(visitor.id);
  check(server_.connections() == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  World world;
  for (int steps = 0; steps < 400 && !input.empty(); ++steps) world.step(input);
  world.end();
  return 0;
}
