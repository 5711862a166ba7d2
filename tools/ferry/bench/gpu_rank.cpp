#include "bench/gpu_rank.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace ferry::cli {
namespace {

constexpr auto kRankWait = std::chrono::minutes(2);

}  // namespace

void need_equal(bool equal, const char* what, std::int64_t row) {
  if (!equal) throw std::runtime_error(fmt::format("{}: row {} is wrong", what, row));
}

void need(cudaError_t result, const char* call) {
  if (result != cudaSuccess) {
    throw std::runtime_error(fmt::format("{}: {}", call, cudaGetErrorName(result)));
  }
}

float scale_of(int rank, std::int64_t token, std::int64_t column) {
  return static_cast<float>((token * 131 + column * 7 + rank * 1009) % 8191 + 1);
}

GroupConfig choose_gpu(const BenchSettings& settings, int rank) {
  int gpus = 0;
  need(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  GroupConfig config;
  config.experts = settings.experts;
  config.fabric = settings.fabric;
  config.backend = Backend::cuda;
  config.device = rank % gpus;
  need(cudaSetDevice(config.device), "cudaSetDevice");
  return config;
}

GpuBuffer::GpuBuffer(std::size_t bytes) {
  need(cudaMalloc(&data_, std::max<std::size_t>(bytes, 16)), "cudaMalloc");
}

GpuStream::GpuStream(int device) {
  need(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  stream.emplace(Stream::of_cuda(raw, device));
}

void GpuStream::upload(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return;
  need(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, raw), "cudaMemcpyAsync");
  need(cudaStreamSynchronize(raw), "cudaStreamSynchronize");
}

void GpuStream::download(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return;
  need(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, raw), "cudaMemcpyAsync");
  need(cudaStreamSynchronize(raw), "cudaStreamSynchronize");
}

GpuExchange::GpuExchange(const BenchSettings& one, Group& group, GpuStream& stream, int device,
                         const NcclRank* nccl)
    : s_(one),
      group_(group),
      stream_(stream),
      device_{DeviceKind::cuda, device},
      routes_(make_routes(one, one.tokens, group.rank())),
      x_(static_cast<std::size_t>(one.tokens * one.hidden) * size_of(one.dtype)),
      ids_(routes_.size() * sizeof(std::int64_t)),
      scales_(static_cast<std::size_t>(one.tokens * one.scales()) * sizeof(float)),
      weights_(routes_.size() * sizeof(float)) {
  const RowPattern pattern(one.data_seed, s_.hidden, s_.dtype);
  std::vector<std::byte> x(static_cast<std::size_t>(s_.tokens) * pattern.row_bytes());
  pattern.fill(x.data(), group.rank(), s_.tokens);
  stream.upload(x_.data(), x.data(), x.size());
  stream.upload(ids_.data(), routes_.data(), routes_.size() * sizeof(std::int64_t));
  std::vector<float> scales;
  for (std::int64_t t = 0; t < s_.tokens; ++t) {
    for (std::int64_t c = 0; c < s_.scales(); ++c) scales.push_back(scale_of(group.rank(), t, c));
  }
  stream.upload(scales_.data(), scales.data(), scales.size() * sizeof(float));
  const std::vector<float> weights(routes_.size(), 1.0f);
  stream.upload(weights_.data(), weights.data(), weights.size() * sizeof(float));
  if (s_.dtype == Dtype::e4m3) make_unquantized();
  plan_ = plan();
  (void)plan_.recv_rows();
  if (nccl != nullptr) {
    nccl_ = std::make_unique<NcclExchange>(*nccl, one, one.data_seed, group.rank(), stream);
  }
}

BenchRows GpuExchange::rows() const {
  return count_rows(s_, routes_, s_.tokens, group_.rank());
}

ConstTensorView GpuExchange::x_view() const {
  return {x_.data(), s_.dtype, {s_.tokens, s_.hidden}, device_};
}

ConstTensorView GpuExchange::routes_view() const {
  return {ids_.data(), Dtype::i64, {s_.tokens, s_.topk}, device_};
}

Plan GpuExchange::plan() {
  return group_.plan(routes_view(), {&*stream_.stream});
}

DispatchOptions GpuExchange::dispatch_options(std::int64_t max_recv_rows, int num_sms) {
  DispatchOptions options;
  if (s_.scales() > 0) {
    options.scales = ConstTensorView(scales_.data(), Dtype::f32, {s_.tokens, s_.scales()}, device_);
  }
  options.max_recv_rows = max_recv_rows;
  options.stream = &*stream_.stream;
  options.num_sms = num_sms;
  return options;
}

Received GpuExchange::dispatch(const Plan& with, RowOrder order, int num_sms) {
  DispatchOptions options = dispatch_options(0, num_sms);
  options.order = order;
  if (order == RowOrder::expert_major) options.alignment = s_.alignment;
  return group_.dispatch(x_view(), with, options);
}

GpuMade GpuExchange::call(BenchCase which, int num_sms) {
  GpuMade made;
  CombineOptions back;
  back.stream = &*stream_.stream;
  back.num_sms = num_sms;
  switch (which) {
    case BenchCase::plan: made.plan = plan(); break;
    case BenchCase::dispatch_full_worst:
    case BenchCase::dispatch_full_exact: {
      const bool exact = which == BenchCase::dispatch_full_exact;
      const DispatchOptions options = dispatch_options(exact ? 0 : max_recv_rows(), num_sms);
      made.received = group_.dispatch(x_view(), routes_view(), options);
      break;
    }
    case BenchCase::dispatch_cached:
      made.received = dispatch(plan_, RowOrder::rank_major, num_sms);
      break;
    case BenchCase::dispatch_expert:
      made.received = dispatch(plan_, RowOrder::expert_major, num_sms);
      break;
    case BenchCase::dispatch_quantized: made.received = dispatch_quantized(num_sms); break;
    case BenchCase::combine_registered:
      made.combined = group_.combine(registered_, plan_, back);
      break;
    case BenchCase::combine_ordinary: {
      ConstTensorView rows = registered_;
      rows.data = ordinary_->data();
      made.combined = group_.combine(rows, plan_, back);
      break;
    }
    case BenchCase::combine_expert:
      back.order = RowOrder::expert_major;
      back.alignment = s_.alignment;
      back.apply_weights = true;
      back.topk_weights =
          ConstTensorView(slot_weights_->data(), Dtype::f32, {plan_.recv_rows(), s_.topk}, device_);
      made.combined = group_.combine(expert_rows_, plan_, back);
      break;
    case BenchCase::nccl_all_to_all: nccl_->call(); break;
    default: throw std::logic_error("not a case of throughput mode on GPUs");
  }
  return made;
}

void GpuExchange::check(bool combines) {
  Received by_rank = call(BenchCase::dispatch_cached, 0).received;
  by_rank.event.wait(kRankWait);
  check_ranks(by_rank);
  Received by_expert = call(BenchCase::dispatch_expert, 0).received;
  by_expert.event.wait(kRankWait);
  check_experts(by_expert);
  for (const BenchCase full : {BenchCase::dispatch_full_worst, BenchCase::dispatch_full_exact}) {
    const GpuMade made = call(full, 0);
    made.received.event.wait(kRankWait);
    check_ranks(made.received);
  }
  if (nccl_) nccl_->check();
  if (unquantized_) {
    const Received quantized = call(BenchCase::dispatch_quantized, 0).received;
    quantized.event.wait(kRankWait);
    check_quantized(quantized);
  }
  if (!combines) return;
  make_combine_rows(by_rank, by_expert);
  by_rank = {};
  by_expert = {};
  for (const BenchCase which :
       {BenchCase::combine_registered, BenchCase::combine_ordinary, BenchCase::combine_expert}) {
    const GpuMade made = call(which, 0);
    made.combined.event.wait(kRankWait);
    check_combined(made.combined, which == BenchCase::combine_expert);
  }
}

void GpuExchange::check_ranks(const Received& received) {
  const RowPattern pattern(s_.data_seed, s_.hidden, s_.dtype);
  const auto x = stream_.get<std::uint8_t>(
      {TensorView(received.x.data(), Dtype::u8,
                  {received.x.rows(), static_cast<std::int64_t>(pattern.row_bytes())}, device_),
       nullptr});
  const auto tokens = stream_.get<std::int32_t>(received.source_token);
  std::vector<float> scales;
  if (s_.scales() > 0) scales = stream_.get<float>(received.scales);
  const auto per_rank = plan_.recv_rows_per_rank();
  std::int64_t row = 0;
  source_of_row_.clear();
  for (int source = 0; source < s_.ranks; ++source) {
    const std::int64_t end = row + per_rank[static_cast<std::size_t>(source)];
    for (; row < end; ++row) {
      const auto at = static_cast<std::size_t>(row);
      need_equal(pattern.matches(x.data() + at * pattern.row_bytes(), source, tokens[at]),
                 "dispatch", row);
      for (std::int64_t c = 0; c < s_.scales(); ++c) {
        need_equal(
            scales[at * static_cast<std::size_t>(s_.scales()) + static_cast<std::size_t>(c)] ==
                scale_of(source, tokens[at], c),
            "dispatch: scales", row);
      }
      source_of_row_.push_back(source);
    }
  }
}

void GpuExchange::check_experts(const Received& received) {
  const RowPattern pattern(s_.data_seed, s_.hidden, s_.dtype);
  const auto x = stream_.get<std::uint8_t>(
      {TensorView(received.x.data(), Dtype::u8,
                  {received.x.rows(), static_cast<std::int64_t>(pattern.row_bytes())}, device_),
       nullptr});
  const auto tokens = stream_.get<std::int32_t>(received.source_token);
  const auto slot_rows = stream_.get<std::int64_t>(received.slot_rows);
  const auto k = static_cast<std::size_t>(s_.topk);
  std::int64_t slots = 0;
  for (std::size_t i = 0; i < source_of_row_.size() * k; ++i) {
    if (slot_rows[i] < 0) continue;
    ++slots;
    const auto at = static_cast<std::size_t>(slot_rows[i]) * pattern.row_bytes();
    need_equal(pattern.matches(x.data() + at, source_of_row_[i / k], tokens[i / k]),
               "dispatch, expert-major", slot_rows[i]);
  }
  std::int64_t expected = 0;
  for (const std::int64_t each : plan_.slots_per_expert()) expected += each;
  need_equal(slots == expected, "dispatch, expert-major: slots", slots);
}

/// Rows as experts would make them that change nothing.
void GpuExchange::make_combine_rows(const Received& by_rank, const Received& by_expert) {
  const RowPattern pattern(s_.data_seed, s_.hidden, s_.combine_dtype());
  const auto tokens = stream_.get<std::int32_t>(by_rank.source_token);
  const auto slot_rows = stream_.get<std::int64_t>(by_expert.slot_rows);
  const auto n = static_cast<std::int64_t>(source_of_row_.size());
  const std::int64_t blocks = plan_.expert_major_rows(s_.alignment);
  const std::size_t row_bytes = pattern.row_bytes();
  std::vector<std::byte> rows(static_cast<std::size_t>(n) * row_bytes);
  std::vector<std::byte> slots(static_cast<std::size_t>(blocks) * row_bytes);
  const auto k = static_cast<std::size_t>(s_.topk);
  for (std::size_t i = 0; i < source_of_row_.size(); ++i) {
    const std::byte* row = pattern.row(source_of_row_[i], tokens[i]);
    std::memcpy(rows.data() + i * row_bytes, row, row_bytes);
    for (std::size_t j = i * k; j < (i + 1) * k; ++j) {
      if (slot_rows[j] < 0) continue;
      std::memcpy(slots.data() + static_cast<std::size_t>(slot_rows[j]) * row_bytes, row,
                  row_bytes);
    }
  }
  registered_ = group_.empty({n, s_.hidden}, s_.combine_dtype());
  stream_.upload(registered_.data(), rows.data(), rows.size());
  ordinary_ = std::make_unique<GpuBuffer>(rows.size());
  stream_.upload(ordinary_->data(), rows.data(), rows.size());
  expert_rows_ = group_.empty({blocks, s_.hidden}, s_.combine_dtype());
  stream_.upload(expert_rows_.data(), slots.data(), slots.size());
  const std::vector<float> ones(source_of_row_.size() * k, 1.0f);
  slot_weights_ = std::make_unique<GpuBuffer>(ones.size() * sizeof(float));
  stream_.upload(slot_weights_->data(), ones.data(), ones.size() * sizeof(float));
}

/// Every token comes back as often as it has destinations, or slots.
void GpuExchange::check_combined(const Combined& combined, bool every_slot) {
  std::vector<RowPattern> times;
  for (int n = 0; n <= s_.topk; ++n) {
    times.emplace_back(s_.data_seed, s_.hidden, s_.combine_dtype(), n);
  }
  const std::size_t row_bytes = times[0].row_bytes();
  std::vector<std::byte> x(static_cast<std::size_t>(s_.tokens) * row_bytes);
  stream_.download(x.data(), combined.x.data(), x.size());
  for (std::int64_t t = 0; t < s_.tokens; ++t) {
    const std::size_t count =
        every_slot ? static_cast<std::size_t>(s_.topk) : destinations(s_, routes_, t).size();
    need_equal(
        times[count].matches(x.data() + static_cast<std::size_t>(t) * row_bytes, group_.rank(), t),
        every_slot ? "combine, expert-major" : "combine", t);
  }
}

}  // namespace ferry::cli
