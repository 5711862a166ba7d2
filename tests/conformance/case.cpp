#include "case.hpp"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "random.hpp"

namespace ferry::conformance {
namespace {

constexpr std::array kFabrics{FabricKind::local, FabricKind::shm, FabricKind::sim};
constexpr std::array kRanks{1, 2, 3, 4, 5, 8};
constexpr std::array<std::int64_t, 4> kHidden{16, 128, 2880, 7168};
constexpr std::array kTopk{1, 2, 8, 10};
constexpr std::array kDtypes{Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::e4m3, Dtype::u8};
constexpr std::array<std::int64_t, 4> kAlignments{0, 1, 8, 128};  // 0: rank-major

constexpr std::array kDeviceFabrics{FabricKind::shm, FabricKind::local};
constexpr std::array kDeviceRanks{1, 2, 3, 4, 8};
constexpr std::array<std::int64_t, 5> kDeviceHidden{16, 128, 2880, 7168, 8192};
constexpr std::array kDeviceTopk{1, 2, 8, 10, 16};
constexpr std::array kDeviceSms{1, 3, 16, 132};

// Axes that the modes share come first.
enum Common { kFabric, kRank, kHiddenSize, kK, kRoute, kExperts, kIndex, kStream, kOut, kSpecial };
enum Throughput {
  kDtype = kSpecial + 1,
  kLayout,
  kSumDtype,
  kRows,
  kWeights,
  kBias,
  kSize,
  kMemory,
  kQuantize,
  kSms  // of Mode::device alone
};
enum Latency {
  kFloat = kSpecial + 1,
  kWire,
  kHook,
  kAlive,
  kResults,
  kPath,
  kCombineFormat,
  kWeightsAhead
};

std::vector<Axis> with_common(std::vector<Axis> own) {
  std::vector<Axis> all{{"fabric", 3},  {"ranks", 6}, {"hidden", 4}, {"topk", 4}, {"routes", 8},
                        {"experts", 4}, {"index", 3}, {"stream", 2}, {"out", 2},  {"special", 2}};
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

template <class Kind, std::size_t N>
const char* pick(const std::array<const char*, N>& names, Kind kind) {
  return names[static_cast<std::size_t>(kind)];
}

template <class T>
T at(int choice) {
  return static_cast<T>(choice);
}

bool is_sum_dtype(Dtype dtype) {
  return dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16;
}

}  // namespace

std::uint64_t base_seed() {
  const char* text = std::getenv("FERRY_TEST_SEED");
  return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 0) : 20261121;
}

std::int64_t Case::experts() const {
  switch (expert_kind) {
    case ExpertKind::even: return 2 * ranks;
    case ExpertKind::odd: return 2 * ranks + 1;
    case ExpertKind::many: return 5 * ranks + ranks / 2;
    case ExpertKind::few: return std::max(1, ranks - 1);
    case ExpertKind::huge: return 384;
  }
  return 1;
}

std::string to_string(const Case& c) {
  static constexpr std::array kRouteNames{"uniform", "zipf",  "one_rank",   "some_empty",
                                          "zero",    "holes", "duplicates", "uneven"};
  static constexpr std::array kIndexNames{"i64", "i32", "strided"};
  static constexpr std::array kRowsNames{"ordinary", "received", "empty"};
  static constexpr std::array kWeightNames{"none", "carried", "applied"};
  static constexpr std::array kSizeNames{"exact", "worst_case", "worst_case_loose"};
  static constexpr std::array kWireNames{"as_is", "e4m3/f32", "e4m3/pow2", "e4m3/packed"};
  static constexpr std::array kHookNames{"none", "dispatch", "combine", "both"};
  static constexpr std::array kFormatNames{"as_is", "e4m3", "logfmt10"};
  std::ostringstream out;
  out << (c.mode == Mode::throughput ? "throughput" : "latency") << " fabric=" << name_of(c.fabric)
      << " ranks=" << c.ranks << " hidden=" << c.hidden << " topk=" << c.topk
      << " experts=" << c.experts() << " tokens=" << c.tokens
      << " routes=" << pick(kRouteNames, c.routes) << " index=" << pick(kIndexNames, c.index)
      << " dtype=" << ferry::name_of(c.dtype) << " stream=" << c.stream << " out=" << c.own_output
      << " special=" << c.special_values;
  if (c.mode == Mode::throughput) {
    out << " order=" << (c.order == RowOrder::rank_major ? "rank_major" : "expert_major")
        << " alignment=" << c.alignment << " combine=" << ferry::name_of(c.combine_dtype)
        << " rows=" << pick(kRowsNames, c.rows) << " weights=" << pick(kWeightNames, c.weights)
        << " biases=" << c.biases << " size=" << pick(kSizeNames, c.size)
        << " small_memory=" << c.small_memory << " wire=" << pick(kWireNames, c.wire);
    if (c.num_sms > 0) out << " num_sms=" << c.num_sms;
  } else {
    out << " wire=" << pick(kWireNames, c.wire) << " hook=" << pick(kHookNames, c.hook)
        << " two_alive=" << c.two_alive << " capacity=" << c.capacity
        << " results=" << (c.results == RowOrder::rank_major ? "rank_major" : "expert_major")
        << " path=" << (c.path == CombinePath::per_rank ? "per_rank" : "per_slot")
        << " combine_format=" << pick(kFormatNames, c.combine_format)
        << " weights_ahead=" << c.weights_ahead;
  }
  out << " seed=" << c.seed;
  return out.str();
}

const std::vector<Axis>& axes(Mode mode) {
  static const std::vector<Axis> throughput = with_common({{"dtype", 5},
                                                           {"layout", 4},
                                                           {"combine dtype", 3},
                                                           {"rows", 3},
                                                           {"weights", 3},
                                                           {"biases", 3},
                                                           {"size", 3},
                                                           {"small memory", 2},
                                                           {"quantize", 3}});
  static const std::vector<Axis> latency = with_common({{"dtype", 3},
                                                        {"wire", 4},
                                                        {"hook", 4},
                                                        {"two alive", 2},
                                                        {"results", 2},
                                                        {"path", 2},
                                                        {"combine format", 3},
                                                        {"weights ahead", 2}});
  static const std::vector<Axis> device = [] {
    std::vector<Axis> all = throughput;
    all[kFabric].choices = static_cast<int>(kDeviceFabrics.size());
    all[kRank].choices = static_cast<int>(kDeviceRanks.size());
    all[kHiddenSize].choices = static_cast<int>(kDeviceHidden.size());
    all[kK].choices = static_cast<int>(kDeviceTopk.size());
    all[kExperts].choices = 5;
    all.push_back({"num_sms", static_cast<int>(kDeviceSms.size())});
    return all;
  }();
  return mode == Mode::device ? device : mode == Mode::throughput ? throughput : latency;
}

bool excluded(Mode mode, int axis_a, int a, int axis_b, int b) {
  if (axis_a > axis_b) return excluded(mode, axis_b, b, axis_a, a);
  if (mode == Mode::latency) return false;
  // Weights are applied to expert-major rows only.
  if (axis_a == kLayout && axis_b == kWeights) {
    return a == 0 && b == static_cast<int>(WeightKind::applied);
  }
  return axis_a == kDtype && axis_b == kQuantize && !is_sum_dtype(kDtypes[at<std::size_t>(a)]) &&
         b > 0;
}

Case make_case(Mode mode, const std::vector<int>& choice) {
  const auto get = [&](int axis) { return choice[static_cast<std::size_t>(axis)]; };
  const auto of = [&](const auto& values, int axis) {
    return values[static_cast<std::size_t>(get(axis))];
  };
  Case c;
  if (mode == Mode::device) {
    c.fabric = of(kDeviceFabrics, kFabric);
    c.ranks = of(kDeviceRanks, kRank);
    c.hidden = of(kDeviceHidden, kHiddenSize);
    c.topk = of(kDeviceTopk, kK);
    c.num_sms = of(kDeviceSms, kSms);
  } else {
    c.mode = mode;
    c.fabric = of(kFabrics, kFabric);
    c.ranks = of(kRanks, kRank);
    c.hidden = of(kHidden, kHiddenSize);
    c.topk = of(kTopk, kK);
  }
  c.routes = at<RouteKind>(get(kRoute));
  c.expert_kind = at<ExpertKind>(get(kExperts));
  c.index = at<IndexKind>(get(kIndex));
  c.stream = get(kStream) != 0;
  c.own_output = get(kOut) != 0;
  c.special_values = get(kSpecial) != 0;
  c.dtype = of(kDtypes, kDtype);
  if (mode == Mode::latency) {
    c.wire = at<WireKind>(get(kWire));
    c.hook = at<HookKind>(get(kHook));
    c.two_alive = get(kAlive) != 0;
    c.results = get(kResults) == 0 ? RowOrder::expert_major : RowOrder::rank_major;
    c.path = at<CombinePath>(get(kPath));
    c.combine_format = at<CombineFormat>(get(kCombineFormat));
    c.weights_ahead = get(kWeightsAhead) != 0;
    return c;
  }
  c.order = get(kLayout) == 0 ? RowOrder::rank_major : RowOrder::expert_major;
  c.alignment = std::max<std::int64_t>(1, of(kAlignments, kLayout));
  c.combine_dtype = of(kDtypes, kSumDtype);
  c.rows = at<RowsKind>(get(kRows));
  c.weights = at<WeightKind>(get(kWeights));
  c.biases = get(kBias);
  c.size = at<SizeKind>(get(kSize));
  c.small_memory = get(kMemory) != 0;
  c.wire = at<WireKind>(get(kQuantize));
  return c;
}

}  // namespace ferry::conformance
