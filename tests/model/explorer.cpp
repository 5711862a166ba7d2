#include "explorer.hpp"

#include <algorithm>
#include <utility>

#include "hash.hpp"

namespace ferry::model {
namespace {

Explorer* running = nullptr;

}  // namespace

Explorer& Explorer::current() {
  return *running;
}

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
  for (const std::size_t i : used_words_) {
    words_[i].stores.clear();
    words_[i].seen.fill(0);
    words_[i].reader = -1;
    words_[i].futex = Clock{};
    words_[i].used = false;
  }
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
    strand->quiet = strand->stored = strand->woken = false;
    strand->hash = 1;
    strand->fiber.start([] {
      Explorer& self = current();
      Fiber::entered(self.main_, self.strands_[static_cast<std::size_t>(self.current_)]->fiber);
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
bool Explorer::known(At at) {
  if (random_ || tracing_ || bounds_.naive || position_ < path_.size()) return false;
  std::uint64_t h = mix(static_cast<std::uint64_t>(current_), static_cast<std::uint64_t>(at));
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
      Word& word = words_[i];
      for (std::size_t s = oldest_visible(word, static_cast<int>(t)); s < word.stores.size(); ++s) {
        Store& store = word.stores[s];
        if (store.hash == 0) {  // made when first asked for: most replayed stores are not
          const std::uint64_t writer = static_cast<std::uint64_t>(store.actor) << 32 | store.tick;
          store.hash = mix(mix(store.value, writer), hash_of(store.release));
        }
        w = mix(w, store.hash);
      }
    }
    h += mix(mix(w, hash_of(words_[i].futex)), 7);  // a sum: words come into use in any order
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

void Explorer::leave() {
  strands_[static_cast<std::size_t>(current_)]->fiber.switch_to(main_);
}

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
  if (known(At::kOperation)) {
    pruned_ = true;
    leave();
  }
  if (preemptions_ >= bounds_.preemptions) return;
  std::array<int, kMaxActors> candidates;
  std::size_t n = 0;
  candidates[n++] = current_;
  for (int t = 0; t < static_cast<int>(strands_.size()); ++t) {
    if (t != current_ && can_go_on(t)) candidates[n++] = t;
  }
  const int next = candidates[choose(n)];
  if (next == current_) return;
  ++preemptions_;
  if (tracing_) note("-- preempted by rank " + std::to_string(next));
  resume(next);
}

bool Explorer::can_go_on(int t) {
  const State state = strands_[static_cast<std::size_t>(t)]->state;
  if (state == State::kAsleep) return slices_used_ < bounds_.slices;
  return state == State::kReady || (state == State::kWaiting && options(t).total() > 0);
}

/// The running fiber waits or is done: somebody else goes on.
void Explorer::block() {
  if (known(At::kBlock)) {
    pruned_ = true;
    leave();
  }
  std::array<int, kMaxActors> candidates;
  std::size_t n = 0;
  bool waiting = false;
  for (int t = 0; t < static_cast<int>(strands_.size()); ++t) {
    const State state = strands_[static_cast<std::size_t>(t)]->state;
    if (state == State::kDone) continue;
    waiting |= state != State::kReady;
    if (slices_used_ < bounds_.slices || can_go_on(t)) candidates[n++] = t;
  }
  if (n == 0 && !waiting) leave();  // all done
  if (n == 0) {
    if (slices_used_ == 0 && !scenario_->silent_rank) {
      failure_ = "deadlock:";
      for (std::size_t t = 0; t < strands_.size(); ++t) {
        const State state = strands_[t]->state;
        if (state == State::kDone) continue;
        failure_ += " rank " + std::to_string(t) +
                    (state == State::kAsleep ? " sleeps on " : " waits on ") +
                    where(strands_[t]->word) + ";";
      }
      leave();
    }
    // Somebody gave up or never came: time passes, and every slice ends.
    if (++quiet_slices_ > 64) fail("livelock: waits go on although nothing can happen");
    for (int t = 0; t < static_cast<int>(strands_.size()); ++t) {
      if (strands_[static_cast<std::size_t>(t)]->state != State::kDone) candidates[n++] = t;
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

// ---- words for people ---------------------------------------------------------------------------

void Explorer::name(const void* from, std::size_t bytes, std::string text) {
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(from) - arena_.data());
  names_[offset] = {bytes, std::move(text)};
}

std::string Explorer::where(const void* address) const {
  const auto offset =
      static_cast<std::size_t>(static_cast<const std::byte*>(address) - arena_.data());
  auto it = names_.upper_bound(offset);
  if (it == names_.begin()) return "arena+" + std::to_string(offset);
  --it;
  if (offset >= it->first + it->second.first) return "arena+" + std::to_string(offset);
  const std::size_t into = offset - it->first;
  return it->second.second + (into > 0 ? "+" + std::to_string(into) : "");
}

void Explorer::note(const std::string& text) {
  if (!tracing_) return;
  trace_ +=
      (actor_ < scenario_->fibers ? "rank " + std::to_string(actor_) : std::string("network")) +
      ": " + text + "\n";
}

}  // namespace ferry::model
