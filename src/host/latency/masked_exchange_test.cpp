// Latency mode with masks when nobody is missing: what ranks agree on, what it takes, and that it
// gives the bytes of one without masks.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "host/latency/test_masked_load.hpp"

namespace ferry::host::test {
namespace {

TEST(HostMaskedExchange, RanksAgreeOnMasks) {
  with_groups(2, {}, [](Group& group) {
    LatencyConfig config = masked_config();
    config.masks = group.rank() == 0;
    expect_error(ErrorKind::mismatch, {"masks"}, [&] { LatencyExchange(group, config); });
    config.masks = false;
    LatencyExchange latency(group, config);
    expect_error(ErrorKind::invalid_argument, {"masks"}, [&] { latency.masked(); });
    expect_error(ErrorKind::invalid_argument, {"masks"}, [&] { latency.rejoin(); });
  });
}

/// What one exchange gives: valid rows, scales, and sums, as bytes.
std::vector<std::uint8_t> bytes_of_round(LatencyExchange& latency, const Load& load,
                                         const ConstTensorView& x, RowOrder order,
                                         WireFormat format, CombineFormat back) {
  std::vector<std::uint8_t> bytes;
  const auto keep = [&](const void* from, std::size_t count) {
    const auto* first = static_cast<const std::uint8_t*>(from);
    bytes.insert(bytes.end(), first, first + count);
  };
  LatencyDispatchOptions options{.format = format, .order = order, .topk_weights = load.weights()};
  const LatencyReceived received = latency.dispatch(x, load.ids(), options);
  const TensorView& rows = received.x.view();
  std::vector<float> sums(static_cast<std::size_t>(rows.shape.product()), 0.0F);
  for (std::int64_t block = 0; block < rows.shape[0]; ++block) {
    for (std::int64_t row = 0; row < received.counts.as<std::int32_t>()[block]; ++row) {
      const std::int64_t at = block * rows.strides[0] + row * rows.strides[1];
      keep(received.x.as<std::uint8_t>() + at * static_cast<std::int64_t>(size_of(rows.dtype)),
           static_cast<std::size_t>(kHidden) * size_of(rows.dtype));
      if (format == WireFormat::e4m3) {
        const Extents& strides = received.scales.view().strides;
        keep(received.scales.as<float>() + block * strides[0] + row * strides[1], sizeof(float));
      }
      float* sum = sums.data() + (block * rows.shape[1] + row) * kHidden;
      for (std::int64_t h = 0; h < kHidden; ++h) sum[h] = static_cast<float>(row + h);
    }
  }
  LatencyCombineOptions combine{.path = CombinePath::per_rank, .format = back};
  const Tensor out = latency.combine({sums.data(), Dtype::f32, rows.shape}, received, combine).x;
  keep(out.data(), static_cast<std::size_t>(kTokens * kHidden) * sizeof(float));
  return bytes;
}

TEST(HostMaskedExchange, FormatsAndOrdersAreThoseWithoutMasks) {
  with_groups(kRanks, with_deadline(30s), [&](Group& group) {
    LatencyConfig config = masked_config();
    LatencyExchange with(group, config);
    config.masks = false;
    LatencyExchange without(group, config);
    Load load(group, with);
    int round = 1;
    for (const RowOrder order : {RowOrder::expert_major, RowOrder::rank_major}) {
      for (const WireFormat format : {WireFormat::as_is, WireFormat::e4m3}) {
        for (const auto back :
             {CombineFormat::as_is, CombineFormat::e4m3, CombineFormat::logfmt10}) {
          const ConstTensorView x = load.x(++round);
          EXPECT_EQ(bytes_of_round(with, load, x, order, format, back),
                    bytes_of_round(without, load, x, order, format, back));
        }
      }
    }
  });
}

TEST(HostMaskedExchange, CombinesTakeOnePlaceForEachRank) {
  with_groups(2, {}, [](Group& group) {
    LatencyExchange latency(group, masked_config());
    Load load(group, latency);
    const LatencyReceived received = latency.dispatch(load.x(1), load.ids());
    expect_error(ErrorKind::invalid_argument, {"path", "per_rank"},
                 [&] { latency.combine(received.x, received, load.weights()); });
  });
}

/// Four channels of f32: a code and a scale for them take five bytes, a row as it is sixteen.
TEST(HostMaskedExchange, TheShortestRowsAreCombinedWhereTheyCame) {
  for (const std::int64_t tokens : {1, 2, 3}) {
    with_groups(2, with_deadline(30s), [&](Group& group) {
      LatencyConfig config{tokens, 4, 1, Dtype::f32};
      config.masks = true;
      LatencyExchange latency(group, config);
      const Batch batch(group.rank(), tokens, 4, 5);
      for (const WireFormat format : {WireFormat::as_is, WireFormat::e4m3, WireFormat::as_is}) {
        LatencyDispatchOptions options{.format = format};
        options.order = RowOrder::rank_major;
        const LatencyReceived received = latency.dispatch(batch.x(), batch.ids(), options);
        if (format == WireFormat::as_is) {
          EXPECT_TRUE(same_rows(latency.combine(received.x, received).x, batch));
          continue;
        }
        for (int source = 0; source < 2; ++source) {
          for (std::int64_t t = 0; t < received.counts.as<std::int32_t>()[source]; ++t) {
            const Extents& strides = received.scales.view().strides;
            const float scale = received.scales.as<float>()[source * strides[0] + t * strides[1]];
            const auto value = static_cast<float>(1000 * source + t);
            EXPECT_EQ(scale, std::max(value, 1e-4F) / 448) << "source " << source << " row " << t;
          }
        }
      }
    });
  }
}

TEST(HostMaskedExchange, TheHintIsTheAllocation) {
  with_groups(3, {}, [](Group& group) {
    const std::size_t before = group.memory().latency_bytes;
    LatencyExchange latency(group, masked_config());
    EXPECT_EQ(group.memory().latency_bytes - before,
              LatencyExchange::memory_hint(masked_config(), 8, 3));
  });
}

}  // namespace
}  // namespace ferry::host::test
