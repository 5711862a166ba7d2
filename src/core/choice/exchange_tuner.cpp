#include "core/choice/exchange_tuner.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <utility>

#include "core/layout.hpp"

namespace ferry {
namespace {

constexpr std::array<std::int64_t, 5> kChunks{64 << 10, 128 << 10, kChunkBytes, 512 << 10, 1 << 20};
/// Numbers of SMs that are tried, within the bounds; these are tried, too.
constexpr std::array<int, 12> kSms{1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 64};

template <class Values, class Value>
int nearest(const Values& values, Value wanted) {
  const auto found = std::lower_bound(values.begin(), values.end(), wanted);
  const auto at = found == values.end() ? found - 1 : found;
  return static_cast<int>(at - values.begin());
}

Crossing other(Crossing crossing) {
  return crossing == Crossing::direct ? Crossing::hierarchical : Crossing::direct;
}

std::string why_of(const TuningSearch& search, bool from_file) {
  const int again = search.restarts();
  const std::string times =
      again == 0   ? ""
      : again == 1 ? "; begun again, as times had shifted"
                   : "; begun again " + std::to_string(again) + " times, as they shifted";
  if (!search.settled()) {
    return "searching: " + std::to_string(search.probes()) + " of at most " +
           std::to_string(TuningSearch::kMostProbes) + " calls timed" + times;
  }
  if (search.probes() == 0) return from_file ? "as the file says" : "nothing to choose from";
  const double gain = search.gain();
  const double percent = std::round((1 - gain) * 100);
  const std::string start = from_file ? "what the file says" : "what the model says";
  const std::string found =
      gain == 0      ? "better than its neighbours"
      : percent >= 1 ? std::to_string(static_cast<int>(percent)) + " % less time than " + start
                     : "no neighbour was faster than " + start + " by more than 3 %";
  return found + ", after " + std::to_string(search.probes()) + " calls" + times;
}

}  // namespace

int tokens_class_of(std::int64_t tokens) {
  return std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(tokens, 1))) - 1;
}

ExchangeTuner::ExchangeTuner(int ranks, std::vector<TunedCall> start, int fewest_sms, int most_sms)
    : ranks_(ranks), start_(std::move(start)) {
  if (fewest_sms < 1) return;
  num_sms_ = {fewest_sms, most_sms};
  for (const int one : kSms) {
    if (one > fewest_sms && one < most_sms) num_sms_.push_back(one);
  }
  std::sort(num_sms_.begin(), num_sms_.end());
  num_sms_.erase(std::unique(num_sms_.begin(), num_sms_.end()), num_sms_.end());
}

const TunedCall* ExchangeTuner::start_of(const TuningKey& key) const {
  const TunedCall* best = nullptr;
  int most = -1;
  for (const TunedCall& one : start_) {
    const bool same_tokens = tokens_class_of(one.tokens) == key.tokens_class;
    const bool fits = one.call == name_of(key.call) && one.dtype == key.dtype &&
                      (one.ranks == 0 || one.ranks == ranks_) &&
                      (one.hidden == 0 || one.hidden == key.hidden) &&
                      (one.tokens == 0 || same_tokens);
    const int says = (one.hidden > 0) + (one.tokens > 0) + (one.ranks > 0) +
                     (one.order == key.order && one.first == key.first);
    if (!fits || says <= most) continue;
    best = &one;
    most = says;
  }
  return best;
}

TuningGrid ExchangeTuner::grid_of(const TuningKey& key) const {
  const TunedCall* given = start_of(key);
  TuningGrid grid;
  if (!num_sms_.empty()) {
    grid.sizes[sm_axis] = static_cast<int>(num_sms_.size());
    const int wanted = given != nullptr && given->num_sms > 0 ? given->num_sms : num_sms_.back();
    grid.start[sm_axis] = nearest(num_sms_, wanted);
  }
  if (key.crosses) {
    grid.sizes[chunk_axis] = static_cast<int>(kChunks.size());
    const bool known = given != nullptr && given->chunk_bytes > 0;
    grid.start[chunk_axis] =
        nearest(kChunks, known ? given->chunk_bytes : std::int64_t{kChunkBytes});
  }
  if (key.any_crossing) {
    grid.sizes[crossing_axis] = 2;
    grid.start[crossing_axis] = given != nullptr && given->crossing == other(key.crossing) ? 1 : 0;
  }
  if (given != nullptr && given->settled) grid.sizes = {1, 1, 1};
  return grid;
}

CallSettings ExchangeTuner::settings_at(const TuningKey& key, const TuningPlace& place) const {
  CallSettings settings;
  settings.crossing = place[crossing_axis] == 0 ? key.crossing : other(key.crossing);
  settings.chunk_bytes = key.crosses ? kChunks[static_cast<std::size_t>(place[chunk_axis])] : 0;
  settings.num_sms = num_sms_.empty() ? 0 : num_sms_[static_cast<std::size_t>(place[sm_axis])];
  return settings;
}

CallSettings ExchangeTuner::next(const TuningKey& key) {
  const auto found = searches_.try_emplace(key, grid_of(key)).first;
  return settings_at(key, found->second.next());
}

ExchangeTuner::State ExchangeTuner::state(const TuningKey& key) const {
  const auto of = [&](const TuningSearch& search) -> State {
    return {settings_at(key, search.next()), settings_at(key, search.best()), search.settled()};
  };
  const auto found = searches_.find(key);
  return found == searches_.end() ? of(TuningSearch(grid_of(key))) : of(found->second);
}

void ExchangeTuner::observe(const TuningKey& key, const CallSettings& settings, std::int64_t tokens,
                            double seconds) {
  const auto found = searches_.find(key);
  if (found == searches_.end() || tokens < 1) return;
  TuningPlace place{};
  place[crossing_axis] = settings.crossing == key.crossing ? 0 : 1;
  if (key.crosses) place[chunk_axis] = nearest(kChunks, settings.chunk_bytes);
  if (!num_sms_.empty()) place[sm_axis] = nearest(num_sms_, settings.num_sms);
  // Calls of one kind may differ in tokens by a factor of two: the time of one is compared.
  found->second.observe(place, seconds / static_cast<double>(tokens));
}

std::vector<TunedCall> ExchangeTuner::tuned() const {
  std::vector<TunedCall> all;
  for (const auto& [key, search] : searches_) {
    const CallSettings best = settings_at(key, search.best());
    TunedCall one;
    one.call = name_of(key.call);
    one.dtype = key.dtype;
    one.order = key.order;
    one.hidden = key.hidden;
    one.ranks = ranks_;
    one.tokens = std::int64_t{1} << key.tokens_class;
    one.first = key.first;
    one.crossing = best.crossing;
    one.chunk_bytes = best.chunk_bytes;
    one.num_sms = best.num_sms;
    one.settled = search.settled();
    one.probes = search.probes();
    one.seconds = search.seconds() * static_cast<double>(one.tokens);
    one.why = why_of(search, start_of(key) != nullptr);
    all.push_back(one);
  }
  return all;
}

}  // namespace ferry
