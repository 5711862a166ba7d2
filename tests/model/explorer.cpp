#include "explorer.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace ferry::model {
namespace {

using protocol::order;

Explorer* running = nullptr;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15ull + (a << 6) + (a >> 2))) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
  return x ^ (x >> 32);
}

std::uint64_t hash_of(const Clock& clock) {
  std::uint64_t h = 1;
  std::array<std::uint64_t, sizeof(clock.at) / 8> parts;
  static_assert(sizeof(clock.at) % 8 == 0);
  std::memcpy(parts.data(), clock.at.data(), sizeof(clock.at));
  for (std::uint64_t part : parts) h = mix(h, part);
  return h;
}

const char* word_of(order o) {
  return o == order::acquire ? "acquire" : o == order::release ? "release" : "relaxed";
}

enum Kind { kAtOperation, kAtBlock, kInWait };

}  // namespace

std::uint64_t load(const std::uint64_t* word, order o) { return Explorer::current().load(word, o); }
void store(std::uint64_t* word, std::uint64_t value, order o) {
  Explorer::current().store(word, value, o);
}
bool compare_exchange(std::uint64_t* word, std::uint64_t& expected, std::uint64_t desired,
                      order o) {
  return Explorer::current().compare_exchange(word, expected, desired, o);
}
void access(const void* data, std::size_t bytes, bool write) {
  Explorer::current().access(data, bytes, write);
}
Waited wait(const std::uint64_t* word, Reached reached, const void* context, order o) {
  return Explorer::current().wait(word, reached, context, o);
}

Explorer& Explorer::current() { return *running; }

// ---- the search ---------------------------------------------------------------------------------

Report Explorer::explore(const Scenario& scenario, const Bounds& bounds) {
  return search(scenario, bounds, false);
}

Report Explorer::sample(const Scenario& scenario, const Bounds& bounds, std::uint64_t seed) {
  rng_.seed(seed);
  return search(scenario, bounds, true);
}

Report Explorer::search(const Scenario& scenario, const Bounds& bounds, bool random) {
  Explorer* const outer = running;
  running = this;
  scenario_ = &scenario;
  bounds_ = bounds;
  random_ = random;
  path_.clear();
  visited_.clear();
  failure_.clear();
  tracing_ = false;
  Report report;
  bool more = true;
  while (more && failure_.empty() && report.executions < bounds.executions) {
    if (random_) path_.clear();
    run_once();
    ++report.executions;
    if (failure_.empty()) more = random_ || advance();
  }
  report.failure = failure_;
  report.passed = failure_.empty();
  report.complete = report.passed && !random_ && !more;
  report.states = visited_.size();
  if (!report.passed) {  // once more, with the pen in hand
    tracing_ = true;
    random_ = false;
    visited_.clear();
    path_.resize(position_);
    run_once();
    report.schedule = trace_;
    tracing_ = false;
  }
  running = outer;
  return report;
}

bool Explorer::advance() {
  while (!path_.empty() && path_.back().taken + 1 == path_.back().of) path_.pop_back();
  if (path_.empty()) return false;
  ++path_.back().taken;
  return true;
}

std::size_t Explorer::choose(std::size_t n) {
  if (n <= 1) return 0;
  if (position_ == path_.size()) {
    const std::size_t taken = random_ ? rng_() % n : 0;
    path_.push_back({static_cast<std::uint32_t>(taken), static_cast<std::uint32_t>(n)});
  }
  return path_[position_++].taken;
}

void Explorer::run_once() {
  for (const std::size_t i : used_words_) words_[i] = Word{};
  for (const std::size_t i : used_granules_) granules_[i] = Granule{};
  used_words_.clear();
  used_granules_.clear();
  arena_.fill(std::byte{0});
  clocks_.fill(Clock{});
  names_.clear();
  trace_.clear();
  failure_.clear();
  position_ = 0;
  preemptions_ = slices_used_ = quiet_slices_ = overtakes_ = 0;
  pruned_ = false;
  scenario_->setup();
  while (strands_.size() < static_cast<std::size_t>(scenario_->fibers)) {
    strands_.push_back(std::make_unique<Strand>());
  }
  strands_.resize(static_cast<std::size_t>(scenario_->fibers));
  for (auto& strand : strands_) {
    strand->state = State::kReady;
    strand->word = nullptr;
    strand->quiet = strand->stored = false;
    strand->hash = 1;
    strand->fiber.start([] {
      Explorer& self = current();
      Fiber::entered(self.main_);
      self.scenario_->body(self.current_);
      self.finish_fiber();
    });
  }
  current_ = actor_ = static_cast<int>(choose(strands_.size()));
  main_.switch_to(strands_[static_cast<std::size_t>(current_)]->fiber);
  const bool ended = std::all_of(strands_.begin(), strands_.end(),
                                 [](const auto& s) { return s->state == State::kDone; });
  if (failure_.empty() && !pruned_ && ended) {
    actor_ = kObserver;  // knows everything; its failures leave no fiber
    clocks_[kObserver].at.fill(0xffff);
    if (scenario_->wire != nullptr) scenario_->wire->drain();
    if (failure_.empty() && scenario_->finish) scenario_->finish();
  }
  if (!failure_.empty()) note("FAILED: " + failure_);
}

/// Whether this state was explored with as many preemptions left; notes it otherwise. What a fiber
/// holds is its last checkpoint and its history since; its place in the program determines its
/// steps, hence the stores and the plain accesses that it made. What remains is what it knows, and
/// what the stores that somebody may still read make known.
bool Explorer::known(int kind) {
  if (random_ || tracing_ || bounds_.naive || position_ < path_.size()) return false;
  std::uint64_t h = mix(static_cast<std::uint64_t>(current_), static_cast<std::uint64_t>(kind));
  h = mix(h, static_cast<std::uint64_t>(slices_used_) * 1000 +
                 static_cast<std::uint64_t>(quiet_slices_));
  if (bounds_.overtakes < kAnyOrder) h = mix(h, static_cast<std::uint64_t>(overtakes_));
  for (std::size_t t = 0; t < strands_.size(); ++t) {
    const Strand& strand = *strands_[t];
    h = mix(h, strand.hash * 4 + static_cast<std::uint64_t>(strand.state));
    if (strand.state != State::kDone) h = mix(h, hash_of(clocks_[t]));
  }
  for (const std::size_t i : used_words_) {
    std::uint64_t w = i;
    for (std::size_t t = 0; t < strands_.size(); ++t) {
      if (words_[i].reader >= 0 && static_cast<std::size_t>(words_[i].reader) != t) continue;
      if (strands_[t]->state == State::kDone) continue;
      const Word& word = words_[i];
      for (std::size_t s = oldest_visible(word, static_cast<int>(t)); s < word.stores.size(); ++s) {
        w = mix(w, word.stores[s].hash);
      }
    }
    h += mix(w, 7);  // a sum: words come into use in any order
  }
  if (scenario_->wire != nullptr) h = mix(h, scenario_->wire->hash());
  const auto [it, fresh] = visited_.try_emplace(h, static_cast<std::uint8_t>(preemptions_));
  if (fresh) return false;
  if (it->second <= preemptions_) return true;
  it->second = static_cast<std::uint8_t>(preemptions_);
  return false;
}

void Explorer::checkpoint(std::uint64_t value) {
  strands_[static_cast<std::size_t>(current_)]->hash = mix(value, 11);
}

void Explorer::only_reader(const void* from, std::size_t bytes, int fiber) {
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(from) - arena_.data());
  for (std::size_t i = offset / 8; i < (offset + bytes) / 8; ++i) {
    word_at(reinterpret_cast<std::uint64_t*>(arena_.data()) + i).reader = fiber;
  }
}

// ---- scheduling ---------------------------------------------------------------------------------

void Explorer::leave() { strands_[static_cast<std::size_t>(current_)]->fiber.switch_to(main_); }

void Explorer::fail(std::string_view what, const void* place) {
  if (failure_.empty()) {
    failure_ = what;
    if (place != nullptr) failure_ += where(place);
  }
  if (actor_ != kObserver) leave();
}

void Explorer::resume(int next) {
  const int from = current_;
  Strand& strand = *strands_[static_cast<std::size_t>(next)];
  strand.state = State::kReady;
  current_ = actor_ = next;
  if (next != from) strands_[static_cast<std::size_t>(from)]->fiber.switch_to(strand.fiber);
}

/// Before the operation that follows a store: another fiber may go first, at the price of a
/// preemption. Before others it need not: nobody sees a read, and reads may return old values, so a
/// switch after reads is the same as a switch before them.
void Explorer::schedule_point() {
  if (actor_ != current_) return;  // a network delivers; it is no fiber
  Strand& strand = *strands_[static_cast<std::size_t>(current_)];
  if (!strand.stored && !bounds_.naive) return;
  strand.stored = false;
  if (known(kAtOperation)) {
    pruned_ = true;
    leave();
  }
  if (preemptions_ >= bounds_.preemptions) return;
  std::array<int, kMaxActors> candidates;
  std::size_t n = 0;
  candidates[n++] = current_;
  for (int t = 0; t < static_cast<int>(strands_.size()); ++t) {
    const State state = strands_[static_cast<std::size_t>(t)]->state;
    if (t == current_ || state == State::kDone) continue;
    if (state == State::kReady || options(t).total() > 0) candidates[n++] = t;
  }
  const int next = candidates[choose(n)];
  if (next == current_) return;
  ++preemptions_;
  if (tracing_) note("-- preempted by rank " + std::to_string(next));
  resume(next);
}

/// The running fiber waits or is done: somebody else goes on.
void Explorer::block() {
  if (known(kAtBlock)) {
    pruned_ = true;
    leave();
  }
  std::array<int, kMaxActors> candidates;
  std::size_t n = 0;
  bool waiting = false;
  for (int t = 0; t < static_cast<int>(strands_.size()); ++t) {
    const State state = strands_[static_cast<std::size_t>(t)]->state;
    if (state == State::kDone) continue;
    waiting |= state == State::kWaiting;
    if (state == State::kReady || slices_used_ < bounds_.slices || options(t).total() > 0) {
      candidates[n++] = t;
    }
  }
  if (n == 0 && !waiting) leave();  // all done
  if (n == 0) {
    if (slices_used_ == 0 && !scenario_->silent_rank) {
      failure_ = "deadlock:";
      for (std::size_t t = 0; t < strands_.size(); ++t) {
        if (strands_[t]->state != State::kWaiting) continue;
        failure_ += " rank " + std::to_string(t) + " waits on " + where(strands_[t]->word) + ";";
      }
      leave();
    }
    // Somebody gave up or never came: time passes, and every slice ends.
    if (++quiet_slices_ > 64) fail("livelock: waits go on although nothing can happen");
    for (int t = 0; t < static_cast<int>(strands_.size()); ++t) {
      if (strands_[static_cast<std::size_t>(t)]->state == State::kWaiting) candidates[n++] = t;
    }
    const int next = candidates[choose(n)];
    strands_[static_cast<std::size_t>(next)]->quiet = true;
    resume(next);
    return;
  }
  resume(candidates[choose(n)]);
}

void Explorer::finish_fiber() {
  strands_[static_cast<std::size_t>(current_)]->state = State::kDone;
  if (tracing_) note("ends");
  block();
}

// ---- memory -------------------------------------------------------------------------------------

bool Explorer::knows(int actor, int writer, std::uint16_t tick) const {
  return writer < 0 || tick <= clocks_[static_cast<std::size_t>(actor)].at[static_cast<std::size_t>(writer)];
}

Explorer::Word& Explorer::word_at(const std::uint64_t* word) {
  const auto offset = static_cast<std::size_t>(reinterpret_cast<const std::byte*>(word) - arena_.data());
  if (offset >= kArenaBytes || offset % 8 != 0) fail("a flag outside of the arena, or not aligned");
  Word& found = words_[offset / 8];
  if (!found.used) {
    found.used = true;
    used_words_.push_back(offset / 8);
    found.stores.push_back({*word, Clock{}, -1, 0, *word});
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
  remember(static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(address) - arena_.data()),
           static_cast<std::uint64_t>(store.actor + 1) << 16 | store.tick);
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
  if (word.reader >= 0 && actor_ != word.reader && actor_ != kObserver) fail("another reader of ", address);
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
  const std::uint64_t writer = static_cast<std::uint64_t>(actor_) << 32 | tick;
  word.stores.push_back({value, release, actor_, tick, mix(mix(value, writer), hash_of(release))});
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

void Explorer::access(const void* data, std::size_t bytes, bool write) {
  if (bytes == 0) return;
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(data) - arena_.data());
  if (offset >= kArenaBytes || bytes > kArenaBytes - offset) fail("plain data outside of the arena");
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
        race = granule.reads.at[static_cast<std::size_t>(a)] > clock.at[static_cast<std::size_t>(a)];
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
  found.miss = found.count > 0 && found.reads[static_cast<std::size_t>(found.count - 1)] + 1u <
                                      word.stores.size();
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
      if (strand.quiet) {  // so long that every store has become visible
        for (const std::size_t i : used_words_) {
          if (!words_[i].stores.empty()) {
            words_[i].seen[actor] = static_cast<std::uint16_t>(words_[i].stores.size() - 1);
          }
        }
      } else {
        ++slices_used_;
      }
      strand.quiet = false;
      if (tracing_) note("time slice ends on " + where(address));
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
      if (tracing_) note("looked too late on " + where(address));
      continue;
    }
    const int item = static_cast<int>(pick) - found.count - (found.miss ? 1 : 0);
    if (item > 0 || found.count > 0) ++overtakes_;
    scenario_->wire->deliver(address, item);
    resumed = false;
    if (known(kInWait)) {
      pruned_ = true;
      leave();
    }
  }
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

// ---- words for people ---------------------------------------------------------------------------

void Explorer::name(const void* from, std::size_t bytes, std::string text) {
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(from) - arena_.data());
  names_[offset] = {bytes, std::move(text)};
}

std::string Explorer::where(const void* address) const {
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(address) - arena_.data());
  auto it = names_.upper_bound(offset);
  if (it == names_.begin()) return "arena+" + std::to_string(offset);
  --it;
  if (offset >= it->first + it->second.first) return "arena+" + std::to_string(offset);
  const std::size_t into = offset - it->first;
  return it->second.second + (into > 0 ? "+" + std::to_string(into) : "");
}

void Explorer::note(const std::string& text) {
  if (!tracing_) return;
  trace_ += (actor_ < scenario_->fibers ? "rank " + std::to_string(actor_) : std::string("network")) +
            ": " + text + "\n";
}

}  // namespace ferry::model
