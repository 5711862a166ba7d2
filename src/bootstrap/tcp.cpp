// Ranks as processes that meet at the TCP store of rank 0.
#include <ferry/bootstrap.hpp>
#include <ferry/error.hpp>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "bootstrap/socket.hpp"
#include "bootstrap/store_client.hpp"
#include "bootstrap/store_errors.hpp"
#include "bootstrap/store_thread.hpp"
#include "bootstrap/wait.hpp"
#include "core/open_files.hpp"

namespace ferry {
namespace {

using namespace bootstrap;
using namespace std::chrono_literals;

constexpr auto kFirstBackoff = 5ms;
constexpr auto kLongestBackoff = 200ms;
constexpr auto kLongestAttempt = 5s;  // then the name's next address has its turn
constexpr auto kAskBefore = 500ms;    // the deadline: who is missing?
constexpr auto kFarewellFlush = 200ms;
constexpr std::size_t kReadBytes = 64 << 10;

class TcpBootstrap final : public Bootstrap {
 public:
  explicit TcpBootstrap(const TcpOptions& options)
      : who_{.rank = options.rank,
             .size = options.size,
             .store = Endpoint{options.address, options.port}.text()},
        process_(::getpid()),
        buffer_(kReadBytes) {
    const Clock::time_point due = due_after(options.deadline);
    if (options.rank == 0) {
      start_store(options, due);
    } else {
      connect(options, due);
    }
  }
  ~TcpBootstrap() override;
  TcpBootstrap(const TcpBootstrap&) = delete;
  TcpBootstrap& operator=(const TcpBootstrap&) = delete;

  int rank() const override { return who_.rank; }
  int size() const override { return who_.size; }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine,
                                                 std::chrono::nanoseconds deadline,
                                                 const OnWait& on_wait) override;
  std::string own_address() const override { return own_address_; }

 private:
  void start_store(const TcpOptions& options, Clock::time_point due);
  void connect(const TcpOptions& options, Clock::time_point due);
  bool try_address(const Address& address, const TcpOptions& options, Clock::time_point due);
  bool greet(const TcpOptions& options, Clock::time_point due);
  void pause(const TcpOptions& options, Clock::time_point due, std::chrono::milliseconds time);
  [[noreturn]] void raise_unreached(const TcpOptions& options) const;

  void pump(Clock::time_point until);
  void read_all();
  void check_usable(std::span<const std::byte> mine) const;
  std::optional<Error> trouble() const;
  void wait_for_parts(std::chrono::nanoseconds deadline, const OnWait& on_wait);
  void say_farewell(Farewell farewell);
  GatherState gather_state() const {
    return {.sequence = client_->sequence(), .arrived = client_->arrived()};
  }

  const Speaker who_;
  const int process_;
  std::unique_ptr<StoreThread> store_;  // rank 0 only
  Descriptor socket_;
  std::string own_address_;
  std::optional<StoreClient> client_;
  std::vector<std::byte> buffer_;
  std::string last_problem_;     // of the attempts to connect
  std::optional<Error> broken_;  // what every further call throws
};

void TcpBootstrap::start_store(const TcpOptions& options, Clock::time_point due) {
  Descriptor listener = listen_at({options.address, options.port}, who_.rank);
  own_address_ = bootstrap::own_address(listener);
  auto [own, other] = socket_pair(who_.rank);
  socket_ = std::move(own);
  store_ = std::make_unique<StoreThread>(
      StoreThread::Config{.server = {.size = options.size, .secret = options.secret},
                          .listener = std::move(listener),
                          .own = std::move(other),
                          .linger = options.deadline});
  if (!greet(options, due)) raise_unreached(options);
}

void TcpBootstrap::connect(const TcpOptions& options, Clock::time_point due) {
  std::chrono::milliseconds backoff = kFirstBackoff;
  std::vector<Address> addresses;
  for (;;) {
    if (addresses.empty())
      addresses = resolve({options.address, options.port}, who_.rank, last_problem_);
    for (const Address& address : addresses) {
      if (try_address(address, options, due)) return;
    }
    if (Clock::now() >= due) raise_unreached(options);
    pause(options, due, backoff);
    backoff = std::min<std::chrono::milliseconds>(2 * backoff, kLongestBackoff);
  }
}

// Whether this rank has joined; throws if it was refused.
bool TcpBootstrap::try_address(const Address& address, const TcpOptions& options,
                               Clock::time_point due) {
  int error = 0;
  socket_ = connect_to(address, error);
  if (!socket_) {
    if (too_many_files(error)) {
      throw Error(ErrorKind::exhausted,
                  "rank " + std::to_string(who_.rank) +
                      ": no socket to reach the store: " + error_text(error),
                  {.rank = who_.rank, .stage = "bootstrap: connect"});
    }
    last_problem_ = std::generic_category().message(error);
    return false;
  }
  const Clock::time_point attempt_due = std::min(due, Clock::now() + kLongestAttempt);
  for (;;) {
    pollfd polled{.fd = socket_.get(), .events = POLLOUT, .revents = 0};
    const Clock::time_point now = Clock::now();
    if (::poll(&polled, 1, int(kWaitSlice.count())) > 0) break;
    if (options.on_wait) options.on_wait();
    if (now >= attempt_due) {
      last_problem_ = "no answer";
      return false;
    }
  }
  error = connect_result(socket_);
  if (error != 0) {
    last_problem_ = std::generic_category().message(error);
    return false;
  }
  own_address_ = bootstrap::own_address(socket_);
  return greet(options, due);
}

bool TcpBootstrap::greet(const TcpOptions& options, Clock::time_point due) {
  client_.emplace(StoreClient::Config{.rank = options.rank,
                                      .size = options.size,
                                      .secret = options.secret,
                                      .nonce = random_nonce()});
  while (client_->state() == StoreClient::State::greeting) {
    const Clock::time_point now = Clock::now();
    pump(std::min(due, now + kWaitSlice));
    if (client_->state() != StoreClient::State::greeting) break;
    if (options.on_wait) options.on_wait();
    if (now >= due) {
      last_problem_ = "something is there, but it does not answer as a Ferry store";
      return false;
    }
  }
  const auto refuse = [&](const char* what) {
    throw Error(ErrorKind::refused,
                "rank " + std::to_string(who_.rank) + ": what answers at " + who_.store + " " +
                    what + "; check MASTER_ADDR, and give this job a port of its own (FERRY_PORT)",
                {.rank = who_.rank, .peer = 0, .stage = "bootstrap: connect"});
  };
  switch (client_->state()) {
    case StoreClient::State::refused: throw refusal_error(who_, *client_->refusal());
    case StoreClient::State::not_a_store: refuse("is not a Ferry store"); break;
    case StoreClient::State::impostor:
      refuse("is a Ferry store that could not prove the job's secret");
      break;
    case StoreClient::State::lost:
      // The store had too many visitors, or the time of the handshake was up: try again.
      last_problem_ = client_->greeted() ? "the store ended the connection during the greeting"
                                         : "something is there, but it hung up at once; perhaps "
                                           "another program has that port";
      return false;
    default: return true;
  }
  return false;
}

void TcpBootstrap::pause(const TcpOptions& options, Clock::time_point due,
                         std::chrono::milliseconds time) {
  const Clock::time_point until = std::min(due, Clock::now() + time);
  do {
    if (options.on_wait) options.on_wait();
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (rest > 0ms) ::poll(nullptr, 0, int(std::min(rest, kWaitSlice).count()));
  } while (Clock::now() < until);
}

void TcpBootstrap::raise_unreached(const TcpOptions& options) const {
  throw Error(ErrorKind::deadline,
              "rank " + std::to_string(who_.rank) + ": rank 0's store was not found at " +
                  who_.store + " within " + spell(options.deadline) + " (last: " + last_problem_ +
                  "); start rank 0, check MASTER_ADDR and the port, or give a longer deadline",
              {.rank = who_.rank, .peer = 0, .stage = "bootstrap: connect"});
}

// Reads and writes what there is, and waits for it until then at most.
void TcpBootstrap::pump(Clock::time_point until) {
  FrameQueue& output = client_->output();
  const short events = short(POLLIN | (output.empty() ? 0 : POLLOUT));
  pollfd polled{.fd = socket_.get(), .events = events, .revents = 0};
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
  if (::poll(&polled, 1, int(std::max(wait, 0ms).count())) <= 0) return;
  if (polled.revents & (POLLIN | POLLHUP | POLLERR)) read_all();
  while (!output.empty()) {
    const Transfer put = write_to(socket_, output.front());
    if (put.ended) {
      read_all();  // the store's last words come before its end
      client_->end_of_stream();
      return;
    }
    if (put.bytes == 0) return;
    output.written(put.bytes);
  }
}

void TcpBootstrap::read_all() {
  for (;;) {
    const Transfer got = read_from(socket_, buffer_);
    if (got.ended) return client_->end_of_stream();
    if (got.bytes == 0) return;
    client_->receive(std::span(buffer_).first(got.bytes));
    if (client_->complete()) return;  // what follows is for the next gather
  }
}

std::optional<Error> TcpBootstrap::trouble() const {
  if (client_->failure()) return failure_error(who_, gather_state(), *client_->failure());
  switch (client_->state()) {
    case StoreClient::State::joined: return std::nullopt;
    case StoreClient::State::closed: return store_gone_error(who_, gather_state(), true);
    case StoreClient::State::lost: return store_gone_error(who_, gather_state(), false);
    default:
      return failure_error(who_, gather_state(), {.kind = FailureKind::broken_frame, .peer = 0});
  }
}

void TcpBootstrap::check_usable(std::span<const std::byte> mine) const {
  const std::string start = "rank " + std::to_string(who_.rank) + ": all_gather: ";
  const ErrorContext context{.rank = who_.rank, .stage = "bootstrap: all_gather"};
  if (::getpid() != process_) {
    throw Error(ErrorKind::unsupported,
                start + "called in a forked child; call it in the process that created it",
                context);
  }
  if (mine.size() > kMaxMessageBytes) {
    throw Error(ErrorKind::invalid_argument,
                start + "mine has " + std::to_string(mine.size()) + " bytes, expected at most " +
                    std::to_string(kMaxMessageBytes),
                context);
  }
  if (broken_) throw *broken_;
}

std::vector<std::vector<std::byte>> TcpBootstrap::all_gather(std::span<const std::byte> mine,
                                                             std::chrono::nanoseconds deadline,
                                                             const OnWait& on_wait) {
  check_usable(mine);
  client_->give(mine);
  try {
    wait_for_parts(deadline, on_wait);
  } catch (const Error& e) {
    if (!broken_) broken_ = e;
    throw;
  } catch (...) {
    if (!broken_) {
      broken_ = Error(ErrorKind::interrupted,
                      "rank " + std::to_string(who_.rank) +
                          ": all_gather: on_wait ended an earlier call; start all ranks anew",
                      {.rank = who_.rank, .stage = "bootstrap: all_gather"});
    }
    throw;
  }
  return client_->take();
}

void TcpBootstrap::wait_for_parts(std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const Clock::time_point due = due_after(deadline);
  const auto before = std::clamp<std::chrono::nanoseconds>(deadline / 2, 0ns, kAskBefore);
  Clock::time_point ask_at = due - before;
  for (;;) {
    pump(std::min({due, ask_at, Clock::now() + kWaitSlice}));
    if (client_->complete()) return;  // before any failure: who left after it is no loss
    if (auto error = trouble()) throw *error;
    const Clock::time_point now = Clock::now();
    if (now >= due) {
      say_farewell(Farewell::deadline);
      throw deadline_error(who_, gather_state(), deadline, client_->absences(),
                           store_ ? store_->accept_error() : 0);
    }
    if (now >= ask_at) {
      client_->ask();
      ask_at = now + std::max<std::chrono::nanoseconds>(before / 4, 1ms);
    }
    if (!on_wait) continue;
    try {
      on_wait();
    } catch (...) {
      say_farewell(Farewell::interrupted);
      throw;
    }
  }
}

void TcpBootstrap::say_farewell(Farewell farewell) {
  client_->leave(farewell);
  const Clock::time_point due = Clock::now() + kFarewellFlush;
  while (client_->state() == StoreClient::State::joined && !client_->output().empty() &&
         Clock::now() < due) {
    pump(due);
  }
}

TcpBootstrap::~TcpBootstrap() {
  if (::getpid() != process_) {
    // A forked child has no store thread; its copy of the store may be in any state. Left alone.
    [[maybe_unused]] StoreThread* left_alone = store_.release();
    return;
  }
  if (client_ && socket_) {
    if (!broken_) say_farewell(Farewell::left);
    if (client_->state() == StoreClient::State::joined) read_all();
    ::shutdown(socket_.get(), SHUT_RDWR);  // also ends copies that a forked child still holds
  }
  socket_.reset();
  store_.reset();
}

void check(const TcpOptions& options) {
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorKind::invalid_argument, "tcp_bootstrap: " + what, {.rank = options.rank});
  };
  constexpr int most = 1 << 16;
  if (options.size < 1 || options.size > most) {
    refuse("size is " + std::to_string(options.size) + ", expected 1 to " + std::to_string(most));
  }
  if (options.rank < 0 || options.rank >= options.size) {
    refuse("rank is " + std::to_string(options.rank) + ", expected 0 to " +
           std::to_string(options.size - 1));
  }
  if (options.port == 0) refuse("port is 0, expected 1 to 65535, the same on all ranks");
  if (options.address.empty()) refuse("address is empty, expected rank 0's host name or number");
  if (options.secret.empty()) {
    refuse("secret is empty, expected the same random text on all ranks");
  }
}

}  // namespace

std::shared_ptr<Bootstrap> tcp_bootstrap(const TcpOptions& options) {
  check(options);
  return std::make_shared<TcpBootstrap>(options);
}

}  // namespace ferry
