// Public names of earlier releases still compile, and mean the same.
#include <gtest/gtest.h>

#include <array>
#include <concepts>
#include <ferry/ferry.hpp>

#include "api/old_options.hpp"
#include "core/test_errors.hpp"

namespace ferry {
namespace {

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static_assert(std::same_as<MemoryUse, MemoryStats>);
static_assert(std::same_as<TimeUse, TimeStats>);
static_assert(std::same_as<NetworkUse, NetworkStats>);
static_assert(std::same_as<NicUse, NicStats>);

TEST(DeprecatedNames, AnErrorIsCaughtByItsOldKind) {
  EXPECT_EQ(Error(ErrorKind::evicted, "masked").kind(), ErrorKind::left_behind);
}

TEST(DeprecatedNames, SmsAreNumSms) {
  EXPECT_EQ(with_new_names(DispatchOptions{.sms = 24}).num_sms, 24);
  EXPECT_EQ(with_new_names(CombineOptions{.sms = 24}).num_sms, 24);
  CombineOptions options;
  options.num_sms = 8;
  EXPECT_EQ(with_new_names(options).num_sms, 8);
  options.sms = 24;
  EXPECT_EQ(with_new_names(options).num_sms, 24);
  EXPECT_EQ(options.sms, 24);
}

TEST(DeprecatedNames, CallsTakeOldFields) {
  Group group(thread_bootstrap(1).front(), {.experts = 1});
  std::array<float, 8> rows{};
  std::array<std::int64_t, 2> ids{}, waits{};
  const ConstTensorView x(rows.data(), Dtype::f32, {2, 4});
  const ConstTensorView routes(ids.data(), Dtype::i64, {2, 1});
  EXPECT_EQ(group.dispatch(x, routes, {.worst_case_rows = 5}).x.rows(), 5);
  EXPECT_EQ(group.dispatch(x, group.plan(routes), {.worst_case_rows = 5}).x.rows(), 5);

  LatencyExchange latency(group, {.capacity = 2, .hidden = 4, .topk = 1, .dtype = Dtype::f32});
  const TensorView two(waits.data(), Dtype::i64, {2});  // there is one rank
  const auto refused = [](auto call) {
    test::expect_error(ErrorKind::invalid_argument, {"wait_ns: got", "[2]"}, call);
  };
  refused([&] { latency.dispatch(x, routes, {.waits = two}); });
  const LatencyReceived received = latency.dispatch(x, routes);
  const ConstTensorView weights(rows.data(), Dtype::f32, {2, 1});
  refused([&] { latency.combine(received.x, received, weights, {.waits = two}); });
  latency.combine(received.x, received, weights);
}

#pragma GCC diagnostic pop

}  // namespace
}  // namespace ferry
