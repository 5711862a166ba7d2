// How a rank joins the job: rank 0 starts the store, the others look for it and shake hands with
// it.
#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "base/open_files.hpp"
#include "bootstrap/tcp.hpp"
#include "platform/process.hpp"

namespace ferry::bootstrap {

using namespace std::chrono_literals;

namespace {

constexpr auto kFirstBackoff = 5ms;
constexpr auto kLongestBackoff = 200ms;
constexpr auto kLongestAttempt = 5s;  // then the name's next address has its turn
constexpr std::size_t kJoinReadBytes = 64 << 10;

/// Where this thread has joined before. What turns it away there now may be the store of that job,
/// which a program that starts anew still holds; the next one takes its place.
/// Hashes of the last ones; nothing to destroy at the thread's end, when g++ for Windows may have
/// freed the memory already.
thread_local std::array<std::size_t, 16> joined_before{};
thread_local std::size_t joined_times = 0;

bool has_joined(const std::string& store) {
  const std::size_t hash = std::hash<std::string>()(store);
  return std::find(joined_before.begin(), joined_before.end(), hash) != joined_before.end();
}

void note_joined(const std::string& store) {
  if (has_joined(store)) return;
  joined_before[joined_times++ % joined_before.size()] = std::hash<std::string>()(store);
}

bool may_be_of_an_earlier_job(const std::string& store, RefusalCode why) {
  return why != RefusalCode::wrong_secret && why != RefusalCode::other_version && has_joined(store);
}

}  // namespace

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
  if (options.address.empty()) refuse("address is empty, expected rank 0's host name or number");
  if (options.address.starts_with('@')) return;  // the kernel knows who is there
  if (options.port == 0) refuse("port is 0, expected 1 to 65535, the same on all ranks");
  if (options.secret.empty()) {
    refuse("secret is empty, expected the same random text on all ranks");
  }
}

TcpBootstrap::TcpBootstrap(const TcpOptions& options)
    : who_{.rank = options.rank,
           .size = options.size,
           .store = StoreAddress{options.address, options.port}.text()},
      process_(process_id()),
      notice_after_(wait_notice_after()),
      buffer_(kJoinReadBytes) {
  check(options);
  const Clock::time_point due = due_after(options.deadline);
  notice_.emplace(notice_after_, Clock::now(), due);
  if (options.rank == 0) {
    start_store(options, due);
  } else {
    connect(options, due);
  }
}

void TcpBootstrap::start_store(const TcpOptions& options, Clock::time_point due) {
  StoreThread::free_place(who_.store);
  Socket listener = listen_at({options.address, options.port}, who_.rank);
  own_address_ = ferry::own_address(listener);
  auto [own, other] = socket_pair(who_.rank);
  socket_ = std::move(own);
  store_ = std::make_unique<StoreThread>(
      StoreThread::Config{.server = {.size = options.size, .secret = options.secret},
                          .listener = std::move(listener),
                          .own = std::move(other),
                          .place = who_.store,
                          .linger = options.deadline});
  if (!shake_hands(options, due)) raise_unreached(options);
}

void TcpBootstrap::connect(const TcpOptions& options, Clock::time_point due) {
  std::chrono::milliseconds backoff = kFirstBackoff;
  std::vector<SocketAddress> addresses;
  for (;;) {
    if (addresses.empty())
      addresses = resolve({options.address, options.port}, who_.rank, last_problem_);
    for (const SocketAddress& address : addresses) {
      if (try_address(address, options, due)) return;
    }
    if (Clock::now() >= due) raise_unreached(options);
    pause(options, due, backoff);
    backoff = std::min<std::chrono::milliseconds>(2 * backoff, kLongestBackoff);
  }
}

// Whether this rank has joined; throws if it was refused.
bool TcpBootstrap::try_address(const SocketAddress& address, const TcpOptions& options,
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
    Polled polled{.socket = socket_.get(), .write = true};
    const Clock::time_point now = Clock::now();
    if (wait_for({&polled, 1}, kWaitSlice)) break;
    while_waiting(options);
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
  own_address_ = ferry::own_address(socket_);
  return shake_hands(options, due);
}

bool TcpBootstrap::shake_hands(const TcpOptions& options, Clock::time_point due) {
  client_.emplace(StoreClient::Config{.rank = options.rank,
                                      .size = options.size,
                                      .secret = options.secret,
                                      .nonce = random_nonce()});
  while (client_->state() == StoreClient::State::handshake) {
    const Clock::time_point now = Clock::now();
    pump(std::min(due, now + kWaitSlice));
    found_ = found_ || client_->answered();
    if (client_->state() != StoreClient::State::handshake) break;
    while_waiting(options);
    if (now >= due) {
      last_problem_ = found_ ? "the handshake was not over in time"
                             : "something is there, but it does not answer as a Ferry store";
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
    case StoreClient::State::refused: {
      const Error refusal = refusal_error(who_, *client_->refusal());
      if (!may_be_of_an_earlier_job(who_.store, client_->refusal()->code)) throw refusal;
      last_problem_ = refusal.what();
      return false;
    }
    case StoreClient::State::not_a_store: refuse("is not a Ferry store"); break;
    case StoreClient::State::impostor:
      refuse("is a Ferry store that could not prove the job's secret");
      break;
    case StoreClient::State::lost:
      // The store had too many visitors, or the time of the handshake was up: try again.
      last_problem_ = client_->answered() ? "the store ended the connection during the handshake"
                                          : "something is there, but it hung up at once; perhaps "
                                            "another program has that port, or many crowd it";
      return false;
    default: note_joined(who_.store); return true;
  }
  return false;
}

void TcpBootstrap::while_waiting(const TcpOptions& options) {
  if (options.on_wait) options.on_wait();
  if (Clock::now() < notice_->next()) return;
  const std::string what =
      found_ ? "for rank 0's store to let it in at " : "for rank 0's store at ";
  const std::string why = last_problem_.empty() ? "no answer yet" : "last: " + last_problem_;
  notice_->say(who_.rank, what + who_.store + " (" + why + ")");
}

void TcpBootstrap::pause(const TcpOptions& options, Clock::time_point due,
                         std::chrono::milliseconds time) {
  const Clock::time_point until = std::min(due, Clock::now() + time);
  do {
    while_waiting(options);
    const auto rest = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (rest > 0ms) std::this_thread::sleep_for(std::min(rest, kWaitSlice));
  } while (Clock::now() < until);
}

void TcpBootstrap::raise_unreached(const TcpOptions& options) const {
  const std::string what = found_ ? "did not let this rank in" : "was not found";
  const std::string to_do = found_ ? "see whether others crowd that port, choose another "
                                     "(FERRY_PORT) that only this job's hosts reach"
                                   : "start rank 0, check MASTER_ADDR and the port";
  throw Error(ErrorKind::deadline,
              "rank " + std::to_string(who_.rank) + ": rank 0's store at " + who_.store + " " +
                  what + " within " + spell(options.deadline) + " (last: " + last_problem_ + "); " +
                  to_do + ", or give a longer deadline",
              {.rank = who_.rank, .peer = 0, .stage = "bootstrap: connect"});
}

}  // namespace ferry::bootstrap
