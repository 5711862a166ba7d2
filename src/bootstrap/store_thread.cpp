#include "bootstrap/store_thread.hpp"

#include <ferry/error.hpp>

#include <algorithm>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/open_files.hpp"
#include "base/process_limits.hpp"
#include "platform/process.hpp"
#include "platform/threads.hpp"

namespace ferry::bootstrap {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kStoreReadBytes = 64 << 10;
constexpr int kAcceptedAtOnce = 64;
constexpr auto kAcceptPause = 100ms;
constexpr auto kLingerAfterFailure = 1s;

Error start_error(const std::string& what, ErrorKind kind = ErrorKind::system) {
  return Error(kind, "rank 0: the store cannot start: " + what,
               {.rank = 0, .stage = "bootstrap: listen"});
}

/// The stores of this process by their places. Never destroyed: a store may outlive statics.
struct Stores {
  std::mutex mutex{};
  std::map<std::string, StoreThread*> by_place{};
};

Stores& stores() {
  static auto& all = *new Stores;
  return all;
}

}  // namespace

StoreThread::StoreThread(Config config)
    : server_(std::move(config.server)),
      place_(std::move(config.place)),
      process_(process_id()),
      listener_(std::move(config.listener)),
      wakeup_(wakeup_error_),
      linger_(config.linger),
      buffer_(kStoreReadBytes) {
  if (wakeup_error_ != 0) {
    throw start_error(error_text(wakeup_error_),
                      too_many_files(wakeup_error_) ? ErrorKind::exhausted : ErrorKind::system);
  }
  links_[server_.open_own()].socket = std::move(config.own);
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& e) {
    throw start_error(thread_limit_text(e.code().value()), ErrorKind::exhausted);
  }
  const std::lock_guard lock(stores().mutex);
  stores().by_place[place_] = this;
}

StoreThread::~StoreThread() {
  {
    const std::lock_guard lock(stores().mutex);
    const auto mine = stores().by_place.find(place_);
    if (mine != stores().by_place.end() && mine->second == this) stores().by_place.erase(mine);
  }
  stop_.store(true, std::memory_order_release);
  wakeup_.wake();
  thread_.join();
}

void StoreThread::run() {
  try {
    while (!stop_.load(std::memory_order_acquire)) {
      serve(1000ms);
      if (asked_.load(std::memory_order_acquire) == Place::asked_for) answer();
    }
    end();
  } catch (const std::exception&) {  // no memory
    // What is half done cannot be gone on with: all see the store end, rank 0 says why.
    listener_.reset();
    links_.clear();
    // In one total order with free_place, which either sees the first or is answered by the second.
    out_of_memory_.store(true);
    asked_.store(Place::answered);
    asked_.notify_all();
  }
}

void StoreThread::free_place(const std::string& place) {
  // Under the lock the store lives, and so does its thread; but not in a forked child.
  const std::lock_guard lock(stores().mutex);
  const auto found = stores().by_place.find(place);
  if (found == stores().by_place.end() || found->second->process_ != process_id()) return;
  StoreThread& store = *found->second;
  store.asked_.store(Place::asked_for);
  if (store.out_of_memory_.load()) return;  // its thread has ended, and its listener with it
  store.wakeup_.wake();
  store.asked_.wait(Place::asked_for, std::memory_order_acquire);
}

void StoreThread::answer() {
  wakeup_.clear();
  if (server_.settled()) listener_.reset();
  asked_.store(Place::answered, std::memory_order_release);
  asked_.notify_all();
}

// One poll, and everything that it found.
void StoreThread::serve(std::chrono::milliseconds longest) {
  const Clock::time_point now = Clock::now();
  Clock::time_point next = now + longest;
  if (const auto tick = server_.next_tick()) next = std::min(next, *tick);
  const bool accepting = listener_ && now >= accept_again_;
  if (listener_ && !accepting) next = std::min(next, accept_again_);

  std::vector<Polled> polled;
  std::vector<Connection> ids;
  polled.push_back({.socket = wakeup_.socket(), .read = true});
  polled.push_back({.socket = accepting ? listener_.get() : -1, .read = true});
  for (const auto& [id, link] : links_) {
    const bool writing = !server_.output(id).empty();
    polled.push_back({.socket = link.socket.get(), .read = !link.ended, .write = writing});
    ids.push_back(id);
  }
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::max(next - now, 0ns));
  wait_for(polled, wait);
  server_.tick(Clock::now());
  // Reading comes first: a farewell must be known before anybody else's end is judged.
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (polled[i + 2].readable) read(ids[i], links_.at(ids[i]));
  }
  if (polled[1].readable) accept_some();
  settle();
}

// A bounded turn: who was let in before is read again before more come.
void StoreThread::accept_some() {
  int error = 0;
  for (int turn = 0; turn < kAcceptedAtOnce; ++turn) {
    Socket socket = accept_from(listener_, error);
    if (!socket) break;
    const Connection id = server_.open(Clock::now());
    Link& link = links_[id];
    link.socket = std::move(socket);
    read(id, link);
  }
  make_room();
  accept_error_.store(error, std::memory_order_relaxed);
  if (error != 0) accept_again_ = Clock::now() + kAcceptPause;
}

// Nobody goes unread: what proves a rank may have come already.
void StoreThread::make_room() {
  while (const auto oldest = server_.surplus()) {
    read(*oldest, links_.at(*oldest));
    if (server_.surplus() == oldest) server_.evict(*oldest);
  }
}

void StoreThread::read(Connection id, Link& link) {
  if (link.ended) return;
  // A bounded turn, so that one talker does not keep the others waiting.
  for (int turn = 0; turn < 16; ++turn) {
    const Transfer got = read_from(link.socket, buffer_);
    if (got.ended) {
      link.ended = true;
      server_.end_of_stream(id);
      return;
    }
    if (got.bytes == 0) return;
    server_.receive(id, std::span(buffer_).first(got.bytes));
  }
}

void StoreThread::write(Connection id, Link& link) {
  for (auto rest = server_.output(id); !rest.empty(); rest = server_.output(id)) {
    const Transfer put = write_to(link.socket, rest);
    if (put.ended) {
      // The peer does not take it any more. What it said before may still be there to be read.
      if (!link.ended) read(id, link);
      link.ended = true;
      server_.end_of_stream(id);
      return;
    }
    if (put.bytes == 0) return;
    server_.written(id, put.bytes);
  }
}

// Writes what can be written and closes what has ended, until nothing changes: closing one
// connection can be news for the others.
void StoreThread::settle() {
  for (bool again = true; again;) {
    again = false;
    for (auto it = links_.begin(); it != links_.end();) {
      const auto here = it++;
      auto& [id, link] = *here;
      if (!link.ended) write(id, link);
      const StoreServer::Fate fate = server_.fate(id);
      if (fate == StoreServer::Fate::ending && !link.ended && !link.shut_down &&
          server_.output(id).empty()) {
        shut_down(link.socket, Direction::sending);
        link.shut_down = true;
      }
      if (fate == StoreServer::Fate::dropped || link.ended) {
        server_.forget(id);
        links_.erase(here);
        again = true;
      }
    }
  }
}

// Everyone has everything: said, and taken by the other side's kernel.
bool StoreThread::delivered() const {
  return std::all_of(links_.begin(), links_.end(), [](const auto& entry) {
    return entry.second.shut_down && unsent_bytes(entry.second.socket) == 0;
  });
}

void StoreThread::end() {
  serve(0ms);  // what rank 0 said last, and whoever left before it
  listener_.reset();
  server_.close();
  settle();
  auto linger = std::chrono::duration_cast<Clock::duration>(linger_);
  if (server_.failed()) linger = std::min<Clock::duration>(linger, kLingerAfterFailure);
  const Clock::time_point due = Clock::now() + linger;
  while (!delivered() && Clock::now() < due) serve(5ms);
  links_.clear();
}

}  // namespace ferry::bootstrap
