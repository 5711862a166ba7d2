// What arguments are refused, and in which words.
#include "core/check.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/call.hpp"
#include "core/check_collectives.hpp"
#include "core/test_errors.hpp"

namespace ferry {
namespace {

void expect_refused(const std::vector<std::string>& words, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::invalid_argument) << e.what();
    for (const auto& word : words) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos)
          << "\"" << e.what() << "\" does not say \"" << word << "\"";
    }
    return;
  }
  ADD_FAILURE() << "not refused: " << words.front();
}

constexpr auto kNoDtype = static_cast<Dtype>(77);

const std::vector<float>& memory() {
  static const std::vector<float> values(64 * 16, 0.0F);
  return values;
}

ConstTensorView tensor(std::int64_t rows, Dtype dtype = Dtype::f32) {
  return {memory().data(), dtype, {rows, 16}};
}

TEST(Check, NumbersOutsideAnEnumerationAreRefused) {
  DispatchOptions dispatch;
  expect_refused({"x", "77"}, [&] { check_dispatch(tensor(4, kNoDtype), 4, 2, dispatch); });
  dispatch.order = static_cast<RowOrder>(5);
  expect_refused({"order", "5", "rank_major"}, [&] { check_dispatch(tensor(4), 4, 2, dispatch); });
  CombineOptions combine{.order = static_cast<RowOrder>(5)};
  expect_refused({"order", "5", "rank_major"}, [&] { check_combine(tensor(4), 4, 2, combine); });
  expect_refused({"rows", "77"}, [&] { check_combine(tensor(4, kNoDtype), 4, 2, {}); });
  expect_refused({"dtype", "77"}, [] { checked_bytes("empty", "shape", {4, 4}, kNoDtype); });
  expect_refused({"topk_idx", "77"}, [&] { checked_routes("plan", tensor(4, kNoDtype), 8); });

  const LatencyConfig config{8, 16, 2, Dtype::f32};
  const std::vector<std::int64_t> ids(8, 0);
  const ConstTensorView routes{ids.data(), Dtype::i64, {4, 2}};
  LatencyDispatchOptions latency{.format = static_cast<WireFormat>(7)};
  expect_refused({"format", "7", "e4m3"},
                 [&] { check_latency_dispatch(tensor(4), routes, config, latency); });
  latency = {WireFormat::e4m3, static_cast<ScaleFormat>(9)};
  expect_refused({"scale_format", "9", "f32_pow2"},
                 [&] { check_latency_dispatch(tensor(4), routes, config, latency); });
  latency = {WireFormat::nvfp4, ScaleFormat::f32_pow2};
  expect_refused({"scale_format", "nvfp4", "f32"},
                 [&] { check_latency_dispatch(tensor(4), routes, config, latency); });
  for (const float g : {0.0F, -1.0F, 0x1p101F, std::numeric_limits<float>::quiet_NaN()}) {
    latency = {.format = WireFormat::nvfp4, .global_scale = g};
    expect_refused({"global_scale", "2^-100 to 2^100"},
                   [&] { check_latency_dispatch(tensor(4), routes, config, latency); });
  }
  latency = {.global_scale = 2};
  expect_refused({"global_scale", "2", "nvfp4"},
                 [&] { check_latency_dispatch(tensor(4), routes, config, latency); });
  const LatencyConfig narrow{8, 8, 2, Dtype::f32};
  latency = {.format = WireFormat::nvfp4};
  expect_refused({"format", "nvfp4 with hidden 8", "16"}, [&] {
    check_latency_dispatch({memory().data(), Dtype::f32, {4, 8}}, routes, narrow, latency);
  });
  dispatch = {.format = WireFormat::nvfp4};
  expect_refused({"format", "nvfp4", "latency mode"},
                 [&] { check_dispatch(tensor(4), 4, 2, dispatch); });
  latency = {};
  latency.order = static_cast<RowOrder>(5);
  expect_refused({"order", "5", "rank_major"},
                 [&] { check_latency_dispatch(tensor(4), routes, config, latency); });
  const auto check_options = [&](const LatencyCombineOptions& options) {
    check_latency_combine(tensor(4), {}, config, {}, options);
  };
  expect_refused({"path", "6", "per_rank"},
                 [&] { check_options({.path = static_cast<CombinePath>(6)}); });
  expect_refused({"format", "8", "logfmt10"},
                 [&] { check_options({.format = static_cast<CombineFormat>(8)}); });
  expect_refused({"dtype", "77"}, [] { check_config(LatencyConfig{8, 16, 2, kNoDtype}); });
  LatencyConfig ordered = config;
  ordered.order = static_cast<RowOrder>(3);
  expect_refused({"order", "3", "rank_major"}, [&] { check_config(ordered); });

  GroupConfig group;
  group.experts = 4;
  group.fabric = static_cast<FabricKind>(11);
  expect_refused({"fabric", "11", "shm"}, [&] { check_config(group); });
  group.fabric = FabricKind::ofi;
  group.domain_size = 2;
  expect_refused({"domain_size", "ofi", "shm"}, [&] { check_config(group); });
  group.domain_size = 0;
  group.ofi.endpoints = 9;
  expect_refused({"ofi.endpoints", "9", "8"}, [&] { check_config(group); });
  group.ofi.endpoints = 0;
  group.fabric = FabricKind::automatic;
  group.backend = static_cast<Backend>(12);
  expect_refused({"backend", "12", "host"}, [&] { check_config(group); });
  group.backend = Backend::cuda;
  group.elastic = "experts";
  check_config(group);
}

TEST(Check, WhatALatencyCombineWritesOverlapsNoRowThatItReads) {
  std::vector<float> rows(16 * 16, 0.0F);
  const LatencyConfig config{8, 16, 2, Dtype::f32};
  LatencyDispatched dispatched;
  dispatched.weights = true;
  dispatched.tokens = 4;
  dispatched.ranks = 2;
  dispatched.local_experts = 1;
  LatencyCombineOptions options{.out = TensorView{rows.data() + 12 * 16, Dtype::f32, {4, 16}}};
  const auto check = [&](std::int64_t blocks) {
    dispatched.local_experts = blocks;
    check_latency_combine({rows.data(), Dtype::f32, {blocks, 16, 16}}, {}, config, dispatched,
                          options);
  };
  expect_refused({"out", "overlaps rows"}, [&] { check(1); });
  check(0);  // a rank without experts has no rows
}

TEST(Check, WhatDispatchCannotQuantise) {
  const auto refused = [](const std::vector<std::string>& words, const ConstTensorView& x,
                          const DispatchOptions& options) {
    expect_refused(words, [&] { check_dispatch(x, 4, 2, options); });
  };
  DispatchOptions options{.scale_format = ScaleFormat::f32_pow2};
  refused({"scale_format", "format e4m3"}, tensor(4), options);
  options.format = static_cast<WireFormat>(7);
  refused({"format", "7", "as_is or e4m3"}, tensor(4), options);
  options.format = WireFormat::e4m3;
  for (const Dtype dtype : {Dtype::e4m3, Dtype::e5m2, Dtype::i32, Dtype::i64, Dtype::u8}) {
    refused({"x", name_of(dtype).data(), "bf16"}, tensor(4, dtype), options);
  }
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    check_dispatch(tensor(4, dtype), 4, 2, options);
  }
  refused({"x", "hidden 24", "16"}, {memory().data(), Dtype::bf16, {4, 24}}, options);
  options.scale_format = ScaleFormat::ue8m0_packed;
  refused({"scale_format", "ue8m0_packed", "f32_pow2"}, tensor(4), options);
  options.scale_format = static_cast<ScaleFormat>(9);
  refused({"scale_format", "9"}, tensor(4), options);
  options.scale_format = ScaleFormat::f32;
  options.scales = ConstTensorView(memory().data(), Dtype::f32, {4, 1});
  refused({"scales", "none", "made on the way"}, tensor(4), options);
  options.scales.reset();
  std::vector<std::byte> out(4 * 16);
  options.out = TensorView(out.data(), Dtype::e4m3, {4, 16});
  check_dispatch(tensor(4), 4, 2, options);
  options.out->dtype = Dtype::u8;
  refused({"out", "u8", "e4m3"}, tensor(4), options);
}

TEST(Check, AnOutSmallerThanTheWorstCaseIsRefused) {
  std::vector<float> out(4 * 16);
  DispatchOptions options;
  options.out = TensorView(out.data(), Dtype::f32, {4, 16});
  options.max_recv_rows = 4;
  check_dispatch(tensor(4), 4, 2, options);
  options.max_recv_rows = 5;
  expect_refused({"out", "4 rows", "at least 5"},
                 [&] { check_dispatch(tensor(4), 4, 2, options); });
}

TEST(Check, StridesOfAnotherNumberOfDimensionsAreRefused) {
  const std::vector<std::int64_t> ids(8, 0);
  for (const Extents& strides : {Extents{2}, Extents{}}) {
    const ConstTensorView routes{ids.data(), Dtype::i64, {4, 2}, strides, {}};
    expect_refused({"topk_idx", "strides", "each dimension"},
                   [&] { checked_routes("plan", routes, 8); });
    const ConstTensorView x{memory().data(), Dtype::f32, {4, 16}, strides, {}};
    expect_refused({"x", "strides"}, [&] { check_dispatch(x, 4, 2, {}); });
    DispatchOptions options;
    options.scales = ConstTensorView{memory().data(), Dtype::f32, {4, 1}, strides, {}};
    expect_refused({"scales", "strides"}, [&] { check_dispatch(tensor(4), 4, 2, options); });
  }
}

TEST(Check, CombineRefusesAnAlignmentOfRankMajorRowsAsDispatchDoes) {
  CombineOptions combine{.alignment = 4};
  expect_refused({"combine", "alignment", "4", "rank_major"},
                 [&] { check_combine(tensor(4), 4, 2, combine); });
  DispatchOptions dispatch{.alignment = 4};
  expect_refused({"dispatch", "alignment", "4", "rank_major"},
                 [&] { check_dispatch(tensor(4), 4, 2, dispatch); });
}

/// One rank, two experts with five and three slots: eight rows in rank-major order.
ExchangePlan five_and_three() {
  const Placement placement{2, 1};
  RouteCounts own = count_routes({0, 0, 0, 0, 0, 1, 1, 1}, 8, 1, placement);
  const std::vector<std::int32_t> counts{8, 5, 3};
  return make_plan(std::move(own), counts, placement, 0);
}

TEST(Check, CombineTakesExactlyTheRowsOfTheDispatch) {
  const ExchangePlan plan = five_and_three();
  const RowLayout rank_major, by_three{RowOrder::expert_major, 3, 0},
      by_six{RowOrder::expert_major, 6, 0};
  const auto check = [&](const std::vector<RowLayout>& used, std::int64_t rows, RowLayout layout) {
    check_combine_rows(plan, used, rows, layout);
  };
  check({}, 8, rank_major);
  check({by_six}, 12, by_six);
  check({rank_major}, 9, by_three);  // the caller's own expert-major rows
  for (const std::int64_t rows : {7, 9, 12}) {
    expect_refused({"rows", std::to_string(rows), "8", "rank_major"},
                   [&] { check({by_six}, rows, rank_major); });
  }
  expect_refused({"rows", "8 rows", "12"}, [&] { check({by_six}, 8, by_six); });
  expect_refused({"alignment", "got 3", "expected 6"}, [&] { check({by_six}, 9, by_three); });
  expect_refused({"alignment", "got 3", "expected 6"}, [&] { check({by_six}, 12, by_three); });
}

TEST(Check, CombineTakesTheRowsOfAWorstCaseDispatch) {
  const ExchangePlan plan = five_and_three();
  const RowLayout worst{RowOrder::expert_major, 4, 40}, worst_rank{RowOrder::rank_major, 1, 20};
  const RowLayout expert{RowOrder::expert_major, 4, 0}, rank;
  check_combine_rows(plan, {worst}, 40, expert);
  check_combine_rows(plan, {worst}, 12, expert);
  check_combine_rows(plan, {worst, worst_rank}, 20, rank);
  expect_refused({"rows", "40", "8"}, [&] { check_combine_rows(plan, {worst}, 40, rank); });
  expect_refused({"rows", "39", "12 or 40 (max_recv_rows)"},
                 [&] { check_combine_rows(plan, {worst}, 39, expert); });
  check_combine_weights(plan, {worst}, {40, 1}, 1);
  check_combine_weights(plan, {worst}, {8, 1}, 1);
  expect_refused({"topk_weights", "[9, 1]", "[8, 1]"},
                 [&] { check_combine_weights(plan, {worst}, {9, 1}, 1); });
}

TEST(Check, LayoutsOfAPlanDoNotGrowWithoutBound) {
  RowLayouts layouts;
  for (int i = 0; i < 1000; ++i) {
    layouts.add({RowOrder::rank_major, 1, i % 100});
    layouts.add({RowOrder::expert_major, 8, 0});
  }
  EXPECT_LE(layouts.all().size(), 64u);
  EXPECT_EQ(layouts.all().back(), (RowLayout{RowOrder::expert_major, 8, 0}));
}

TEST(Check, LayoutsOfRefusedDispatchesAreForgotten) {
  const RowLayout few{RowOrder::rank_major, 1, 4}, enough{RowOrder::rank_major, 1, 40};
  RowLayouts layouts;
  const auto first = layouts.add(enough);
  --*layouts.add(few);
  --*layouts.add(enough);  // for another rank's sake: rows of the first are valid still
  EXPECT_EQ(layouts.all(), std::vector{enough});
  --*first;
  EXPECT_TRUE(layouts.all().empty());
  layouts.add(few);
  EXPECT_EQ(layouts.all(), std::vector{few});
}

TEST(CallWord, SurvivesTheWire) {
  for (const CallWord& word : {CallWord{}, CallWord{CallKind::barrier, 0},
                               CallWord{CallKind::latency_dispatch, 0xffffffff}}) {
    EXPECT_EQ(unpack_call(pack(word)), word);
  }
  EXPECT_EQ(to_string(CallWord{CallKind::latency_combine, 2}), "latency combine of exchange 2");
  EXPECT_EQ(to_string(CallWord{}), "no call of this group");
  EXPECT_EQ(to_string(unpack_call(~0ull)).substr(0, 15), "an unknown call");
  for (const char* name : {"plan", "dispatch", "combine", "barrier", "LatencyExchange",
                           "latency dispatch", "latency combine"}) {
    EXPECT_STREQ(name_of(call_named(name)), name);
  }
}

TEST(Check, GpusRunTwoAlgorithms) {
  constexpr std::int64_t kMost = 1024;
  const auto chosen = [](Algorithm algorithm, std::int64_t bytes) {
    return gpu_algorithm({.algorithm = algorithm}, bytes, kMost);
  };
  EXPECT_EQ(chosen(Algorithm::automatic, kMost), Algorithm::one_shot);
  EXPECT_EQ(chosen(Algorithm::automatic, kMost + 1), Algorithm::direct);
  EXPECT_EQ(chosen(Algorithm::one_shot, kMost), Algorithm::one_shot);
  EXPECT_EQ(chosen(Algorithm::direct, 4), Algorithm::direct);
  expect_refused({"all_reduce: algorithm: got one_shot for 1025 bytes", "at most 1024 bytes"},
                 [&] { chosen(Algorithm::one_shot, kMost + 1); });
  for (const Algorithm algorithm : {Algorithm::hierarchical, Algorithm::ring, Algorithm::tree}) {
    expect_refused(
        {"all_reduce: algorithm: got " + std::string(name_of(algorithm)) + " with backend cuda",
         "automatic, direct, or one_shot up to 1024 bytes"},
        [&] { chosen(algorithm, 4); });
  }
  expect_refused({"all_reduce: shares: got 1 numbers", "backend host"},
                 [&] { gpu_algorithm({.shares = {1}}, 4, kMost); });
}

// Where algorithms differ, numbers of SMs do, too: the message names the cause.
TEST(Check, DifferencesOfCollectivesNameTheCause) {
  CallSignature mine;
  mine.kind = CallKind::all_reduce;
  mine.collective.blocks = 1;
  mine.collective.algorithm = 2;
  CallSignature theirs = mine;
  EXPECT_EQ(difference(theirs, 3, mine), "");
  theirs.collective.blocks = 2;
  EXPECT_EQ(difference(theirs, 3, mine), "the number of SMs is 2 on rank 3 but 1 here");
  theirs.collective.algorithm = 1;
  EXPECT_EQ(difference(theirs, 3, mine), "algorithm is one_shot on rank 3 but direct here");
  theirs.collective.op = 4;
  EXPECT_EQ(difference(theirs, 3, mine), "op is max on rank 3 but sum here");
  mine.kind = theirs.kind = CallKind::all_to_all;
  theirs.collective.op = 0;
  theirs.collective.has_counts = 1;
  EXPECT_EQ(difference(theirs, 3, mine), "counts is given on rank 3 but not given here");
}

// The words of a call have a meaning by its kind: the same bytes, other words.
TEST(Check, DifferencesSpeakOfTheKindOfTheCall) {
  CallSignature mine, theirs;
  theirs.exchange.scale_columns = 8;
  const auto said = [&](CallKind kind) {
    mine.kind = theirs.kind = kind;
    return difference(theirs, 1, mine);
  };
  EXPECT_EQ(said(CallKind::dispatch), "the number of scales a token is 8 on rank 1 but 0 here");
  EXPECT_EQ(said(CallKind::latency), "capacity is 8 on rank 1 but 0 here");
  EXPECT_EQ(said(CallKind::broadcast), "the number of SMs is 8 on rank 1 but 0 here");
  theirs.exchange = {};
  theirs.exchange.plan_number = 2;
  EXPECT_EQ(said(CallKind::combine), "the plan (by the order of making) is 2 on rank 1 but 0 here");
  mine.exchange.plan_number = kInGraph | 5;
  EXPECT_EQ(said(CallKind::combine),
            "the plan (by the order of making) is 2 on rank 1 but 5 of a graph here");
  mine.exchange.plan_number = 0;
  EXPECT_EQ(said(CallKind::all_reduce), "shares (as a hash) is 2 on rank 1 but 0 here");
}

}  // namespace
}  // namespace ferry
