// The explorer's memory: flags with every store that may still be read, plain data with the last
// accesses, waits.
#include <algorithm>
#include <cstring>
#include <utility>

#include "explorer.hpp"
#include "hash.hpp"

namespace ferry::model {
namespace {

using protocol::order;

const char* word_of(order o) {
  return o == order::acquire ? "acquire" : o == order::release ? "release" : "relaxed";
}

}  // namespace

std::uint64_t load(const std::uint64_t* word, order o) {
  return Explorer::current().load(word, o);
}
void store(std::uint64_t* word, std::uint64_t value, order o) {
  Explorer::current().store(word, value, o);
}
bool compare_exchange(std::uint64_t* word, std::uint64_t& expected, std::uint64_t desired,
                      order o) {
  return Explorer::current().compare_exchange(word, expected, desired, o);
}
std::uint64_t fetch_add(std::uint64_t* word, std::uint64_t more, order o) {
  return Explorer::current().fetch_add(word, more, o);
}
void sleep(const std::uint64_t* word, std::uint64_t seen) {
  Explorer::current().sleep(word, seen);
}
void wake(const std::uint64_t* word) {
  Explorer::current().wake(word);
}
void access(const void* data, std::size_t bytes, bool write) {
  Explorer::current().access(data, bytes, write);
}
Waited wait(const std::uint64_t* word, Reached reached, const void* context, order o) {
  return Explorer::current().wait(word, reached, context, o);
}

// ---- memory -------------------------------------------------------------------------------------

bool Explorer::knows(int actor, int writer, std::uint16_t tick) const {
  return writer < 0 ||
         tick <= clocks_[static_cast<std::size_t>(actor)].at[static_cast<std::size_t>(writer)];
}

Explorer::Word& Explorer::word_at(const std::uint64_t* word) {
  const auto offset =
      static_cast<std::size_t>(reinterpret_cast<const std::byte*>(word) - arena_.data());
  if (offset >= kArenaBytes || offset % 8 != 0) fail("a flag outside of the arena, or not aligned");
  Word& found = words_[offset / 8];
  if (!found.used) {
    found.used = true;
    used_words_.push_back(offset / 8);
    found.stores.push_back({*word, Clock{}, -1, 0, 1});
  }
  return found;
}

std::size_t Explorer::oldest_visible(const Word& word, int actor) const {
  const std::size_t seen = word.seen[static_cast<std::size_t>(actor)];
  for (std::size_t i = word.stores.size(); i-- > seen;) {  // the newest known store hides the older
    if (knows(actor, word.stores[i].actor, word.stores[i].tick)) return i;
  }
  return seen;
}

void Explorer::remember(std::uint64_t a, std::uint64_t b) {
  Strand& strand = *strands_[static_cast<std::size_t>(current_)];
  strand.hash = mix(mix(strand.hash, a), b);
}

void Explorer::take(Word& word, std::size_t index, order o, const char* verb,
                    const std::uint64_t* address) {
  const Store& store = word.stores[index];
  word.seen[static_cast<std::size_t>(actor_)] = static_cast<std::uint16_t>(index);
  if (o == order::acquire) clocks_[static_cast<std::size_t>(actor_)].join(store.release);
  const auto offset =
      static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(address) - arena_.data());
  const std::uint64_t writer = static_cast<std::uint64_t>(store.actor + 1) << 16 | store.tick;
  remember(offset << 32 | writer, store.value);  // the value: an addition's is not its writer's
  if (tracing_) {
    note(std::string(verb) + " " + word_of(o) + " " + where(address) + " = " +
         std::to_string(store.value) +
         (index + 1 < word.stores.size()
              ? " (stale; newest is " + std::to_string(word.stores.back().value) + ")"
              : ""));
  }
}

std::uint64_t Explorer::load(const std::uint64_t* address, order o) {
  schedule_point();
  Word& word = word_at(address);
  if (word.reader >= 0 && actor_ != word.reader && actor_ != kObserver)
    fail("another reader of ", address);
  const std::size_t oldest = oldest_visible(word, actor_);
  const std::size_t index = word.stores.size() - 1 - choose(word.stores.size() - oldest);
  take(word, index, o, "load", address);
  return word.stores[index].value;
}

void Explorer::append(std::uint64_t* address, std::uint64_t value, order o, const Clock& base) {
  Word& word = word_at(address);
  const auto actor = static_cast<std::size_t>(actor_);
  const std::uint16_t tick = step();
  Clock release = base;  // an exchange goes on with the release sequence of what it replaced
  if (o == order::release) {
    release.join(clocks_[actor]);
    release.at[actor] = std::max(release.at[actor], tick);
  }
  word.stores.push_back({value, release, actor_, tick, 0});
  word.seen[actor] = static_cast<std::uint16_t>(word.stores.size() - 1);
  std::memcpy(address, &value, sizeof(value));
}

void Explorer::store(std::uint64_t* address, std::uint64_t value, order o) {
  schedule_point();
  append(address, value, o, Clock{});
  if (actor_ == current_) {
    remember(2, value);
    stored(word_at(address).reader);
  }
  if (tracing_) {
    note(std::string("store ") + word_of(o) + " " + where(address) + " = " + std::to_string(value));
  }
}

bool Explorer::compare_exchange(std::uint64_t* address, std::uint64_t& expected,
                                std::uint64_t desired, order o) {
  schedule_point();
  Word& word = word_at(address);
  // Fails on any visible store with another value; succeeds on the newest one alone.
  std::array<std::size_t, 64> outcomes;
  std::size_t n = 0;
  for (std::size_t i = word.stores.size(); i-- > oldest_visible(word, actor_);) {
    const bool equal = word.stores[i].value == expected;
    if ((!equal || i + 1 == word.stores.size()) && n < outcomes.size()) outcomes[n++] = i;
  }
  const std::size_t index = outcomes[choose(n)];
  const bool equal = word.stores[index].value == expected;
  if (!equal) {
    take(word, index, order::relaxed, "compare-exchange failed", address);
    expected = word.stores[index].value;
    return false;
  }
  take(word, index, o, "compare-exchange", address);
  const Clock base = word.stores[index].release;
  append(address, desired, o, base);
  stored(word.reader);
  if (tracing_) note("  exchanged to " + std::to_string(desired));
  return true;
}

std::uint64_t Explorer::fetch_add(std::uint64_t* address, std::uint64_t more, order o) {
  schedule_point();
  Word& word = word_at(address);
  const Store replaced = word.stores.back();
  take(word, word.stores.size() - 1, o, "add to", address);
  append(address, replaced.value + more, o, replaced.release);
  stored(word.reader);
  if (tracing_) note("  now " + std::to_string(replaced.value + more));
  return replaced.value;
}

void Explorer::access(const void* data, std::size_t bytes, bool write) {
  if (bytes == 0) return;
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(data) - arena_.data());
  if (offset >= kArenaBytes || bytes > kArenaBytes - offset)
    fail("plain data outside of the arena");
  const auto actor = static_cast<std::size_t>(actor_);
  const std::uint16_t tick = step();
  const Clock& clock = clocks_[actor];
  if (tracing_) note(std::string(write ? "write " : "read ") + where(data));
  for (std::size_t i = offset / 8; i <= (offset + bytes - 1) / 8; ++i) {
    Granule& granule = granules_[i];
    if (!granule.used) {
      granule.used = true;
      used_granules_.push_back(i);
    }
    bool race = !knows(actor_, granule.writer, granule.written);
    if (write) {
      for (int a = 0; a < kMaxActors && !race; ++a) {
        race =
            granule.reads.at[static_cast<std::size_t>(a)] > clock.at[static_cast<std::size_t>(a)];
      }
      granule.writer = actor_;
      granule.written = tick;
    } else {
      granule.reads.at[actor] = tick;
    }
    if (race) fail("data race on ", data);
  }
}

// ---- waiting ------------------------------------------------------------------------------------

Explorer::Options Explorer::options(int t) {
  Options found;
  const Strand& strand = *strands_[static_cast<std::size_t>(t)];
  const Word& word = word_at(strand.word);
  for (std::size_t i = oldest_visible(word, t); i < word.stores.size(); ++i) {
    if (strand.reached(strand.context, word.stores[i].value)) {
      found.reads[static_cast<std::size_t>(found.count++)] = static_cast<std::uint16_t>(i);
    }
  }
  found.miss = found.count > 0 &&
               found.reads[static_cast<std::size_t>(found.count - 1)] + 1u < word.stores.size();
  if (scenario_->wire == nullptr) return found;
  found.deliveries = scenario_->wire->pending(strand.word);
  if (overtakes_ >= bounds_.overtakes) {
    found.deliveries = std::min(found.deliveries, found.count > 0 ? 0 : 1);
  }
  return found;
}

Waited Explorer::wait(const std::uint64_t* address, Reached reached, const void* context, order o) {
  schedule_point();
  Strand& strand = *strands_[static_cast<std::size_t>(current_)];
  if (const int reader = word_at(address).reader; reader >= 0 && reader != current_) {
    fail("another reader of ", address);
  }
  strand.word = address;
  strand.reached = reached;
  strand.context = context;
  const auto actor = static_cast<std::size_t>(actor_);
  bool resumed = false;
  for (;;) {
    Word& word = word_at(address);
    const Options found = options(current_);
    const bool may_slice = slices_used_ < bounds_.slices && (found.total() > 0 || resumed);
    if (strand.quiet || (may_slice && (found.total() == 0 || choose(2) == 1))) {
      remember(strand.quiet ? 3 : 4, reinterpret_cast<std::uintptr_t>(address));
      end_slice();
      return {true, word.stores[word.seen[actor]].value};
    }
    if (found.total() == 0) {
      strand.state = State::kWaiting;
      if (tracing_) note("waits on " + where(address));
      block();
      resumed = true;
      continue;
    }
    const std::size_t pick = choose(static_cast<std::size_t>(found.total()));
    if (pick < static_cast<std::size_t>(found.count)) {
      const std::size_t index = found.reads[pick];
      take(word, index, o, "wait saw", address);
      return {false, word.stores[index].value};
    }
    if (found.miss && pick == static_cast<std::size_t>(found.count)) {
      word.seen[actor] = static_cast<std::uint16_t>(word.stores.size() - 1);
      remember(5, word.stores.size());
      resumed = false;
      if (tracing_) note("read too late on " + where(address));
      continue;
    }
    const int item = static_cast<int>(pick) - found.count - (found.miss ? 1 : 0);
    if (item > 0 || found.count > 0) ++overtakes_;
    scenario_->wire->deliver(address, item);
    resumed = false;
    if (known(At::kWait)) {
      pruned_ = true;
      leave();
    }
  }
}

/// The running fiber's wait or sleep has taken as long as its time slice.
void Explorer::end_slice() {
  Strand& strand = *strands_[static_cast<std::size_t>(current_)];
  if (strand.quiet) {  // so long that every store has become visible
    for (const std::size_t i : used_words_) {
      if (words_[i].stores.empty()) continue;
      words_[i].seen[static_cast<std::size_t>(current_)] =
          static_cast<std::uint16_t>(words_[i].stores.size() - 1);
    }
  } else {
    ++slices_used_;
  }
  strand.quiet = false;
  if (tracing_) note("time slice ends on " + where(strand.word));
}

void Explorer::sleep(const std::uint64_t* address, std::uint64_t seen) {
  schedule_point();
  Strand& strand = *strands_[static_cast<std::size_t>(current_)];
  Clock& clock = clocks_[static_cast<std::size_t>(current_)];
  Word& word = word_at(address);
  clock.join(word.futex);
  const std::size_t oldest = oldest_visible(word, current_);
  const std::size_t index = word.stores.size() - 1 - choose(word.stores.size() - oldest);
  take(word, index, order::relaxed, "before a sleep: load", address);
  if (word.stores[index].value != seen) return;
  word.futex = clock;
  strand.word = address;
  strand.state = State::kAsleep;
  if (tracing_) note("sleeps on " + where(address));
  block();
  const bool woken = std::exchange(strand.woken, false);
  remember(woken ? 7 : strand.quiet ? 3 : 4, reinterpret_cast<std::uintptr_t>(address));
  if (!woken) end_slice();
}

void Explorer::wake(const std::uint64_t* address) {
  schedule_point();
  Word& word = word_at(address);
  Clock& clock = clocks_[static_cast<std::size_t>(current_)];
  clock.join(word.futex);
  word.futex = clock;
  for (auto& strand : strands_) {
    if (strand->state != State::kAsleep || strand->word != address) continue;
    strand->state = State::kReady;
    strand->woken = true;
  }
  remember(8, reinterpret_cast<std::uintptr_t>(address));
  stored(-1);
  if (tracing_) note("wakes " + where(address));
}

Clock Explorer::snapshot() {
  step();
  return clocks_[static_cast<std::size_t>(actor_)];
}

void Explorer::send_point(std::uint64_t what) {
  schedule_point();
  remember(6, what);
  stored(-1);
}

void Explorer::stored(int reader) {
  if (reader != current_) strands_[static_cast<std::size_t>(current_)]->stored = true;
}

/// The number of the running actor's next step. A network's steps are numbered by what it carries:
/// two pieces know nothing of each other, whichever lands first.
std::uint16_t Explorer::step() {
  if (actor_ == kObserver) return 0xffff;
  if (actor_ != current_) return wire_tick_;
  return ++clocks_[static_cast<std::size_t>(actor_)].at[static_cast<std::size_t>(actor_)];
}

}  // namespace ferry::model
