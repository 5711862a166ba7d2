// What a rank does at the store: gathers, and leaves.
#include "bootstrap/tcp.hpp"

#include <algorithm>
#include <string>

#include "base/log.hpp"
#include "base/process_limits.hpp"
#include "bootstrap/join.hpp"
#include "platform/process.hpp"

namespace ferry::bootstrap {

using namespace std::chrono_literals;

namespace {

constexpr auto kAskBefore = 500ms;  // the deadline: who is missing?
constexpr auto kAnswerWithin = 1s;  // who is missing, for a line on stderr
constexpr auto kFarewellFlush = 200ms;

}  // namespace

// Reads and writes what there is, and waits for it until then at most.
void TcpBootstrap::pump(Clock::time_point until) {
  FrameQueue& output = client_->output();
  Polled polled{.socket = socket_.get(), .read = true, .write = !output.empty()};
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
  if (!wait_for({&polled, 1}, std::max(wait, 0ms))) return;
  if (polled.readable) read_all();
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
    case StoreClient::State::lost:
      if (store_ && store_->out_of_memory()) return store_full_error(who_, gather_state());
      return store_gone_error(who_, gather_state(), false);
    default:
      return failure_error(who_, gather_state(), {.kind = FailureKind::broken_frame, .peer = 0});
  }
}

void TcpBootstrap::check_usable(std::span<const std::byte> mine) const {
  const std::string start = "rank " + std::to_string(who_.rank) + ": all_gather: ";
  const ErrorContext context{.rank = who_.rank, .stage = "bootstrap: all_gather"};
  if (process_id() != process_) {
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
  try {
    in_words(who_.rank, "all_gather", [&] {
      client_->give(mine);
      wait_for_parts(deadline, on_wait);
    });
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

// Who is missing is the store's to say: the line comes with its answer, or without one after a
// second.
void TcpBootstrap::say_who_is_missing() {
  const Clock::time_point now = Clock::now();
  if (now < notice_->next()) return;
  if (!asked_) {
    asked_ = Asked{now, client_->answers()};
    client_->ask();
  }
  const bool answered = client_->answers() != asked_->answers;
  if (!answered && now < asked_->at + kAnswerWithin) return;
  asked_.reset();
  const auto absences = answered ? client_->absences() : std::nullopt;
  notice_->say(who_.rank, for_others(who_.store, stage()) + ": " +
                              missing_text(absences, store_ ? store_->accept_error() : 0));
}

void TcpBootstrap::wait_for_parts(std::chrono::nanoseconds deadline, const OnWait& on_wait) {
  const Clock::time_point due = due_after(deadline);
  notice_.emplace(notice_after_, Clock::now(), due);
  asked_.reset();
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
    say_who_is_missing();
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
  if (process_id() != process_) {
    // A forked child has no store thread; its copy of the store may be in any state. Left alone.
    [[maybe_unused]] StoreThread* left_alone = store_.release();
    return;
  }
  if (client_ && socket_) {
    try {
      if (!broken_) say_farewell(Farewell::left);
      if (client_->state() == StoreClient::State::joined) read_all();
    } catch (const std::exception&) {  // no memory: the others see the connection end
    }
    shut_down(socket_, Direction::both);  // also ends copies that a forked child still holds
  }
  socket_.reset();
  store_.reset();
}

}  // namespace ferry::bootstrap

namespace ferry {

std::shared_ptr<Bootstrap> tcp_bootstrap(const TcpOptions& options) {
  read_log_level();
  auto made = in_words(options.rank, "tcp_bootstrap", [&]() -> std::shared_ptr<Bootstrap> {
    if (options.join || options.begin) {
      bootstrap::check(options);
      return bootstrap::lone_bootstrap(
          options.rank, options.size,
          {.name = bootstrap::StoreAddress{options.address, options.port}.text(),
           .join = options.join,
           .begin = options.begin});
    }
    return std::make_shared<bootstrap::TcpBootstrap>(options);
  });
  if (logs(LogLevel::info)) {
    const std::string store = bootstrap::StoreAddress{options.address, options.port}.text();
    log(LogLevel::info, options.rank, "bootstrap",
        {{"size", options.size}, {"store", store}, {"joins", int{options.join}}});
  }
  return made;
}

}  // namespace ferry
