// Latency combine, sending: the rows of a token to its owner, one for each slot or, summed here,
// one for each rank.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <span>
#include <string>
#include <thread>

#include "base/text.hpp"
#include "core/check.hpp"
#include "host/kernels/kernels.hpp"
#include "host/latency/memory.hpp"
#include "protocol/delivery.hpp"

namespace ferry::host {
namespace {

/// The sum of one token's slots on this rank, in ascending k, rounded to the dtype.
class SlotSum {
 public:
  explicit SlotSum(const LatencyConfig& config)
      : topk_(config.topk),
        row_bytes_(static_cast<std::size_t>(config.hidden) * size_of(config.dtype)) {
    sum_.rows = rows_.data();
    sum_.weights = weights_.data();
    sum_.columns = config.hidden;
    sum_.dtype = config.dtype;
  }
  /// `places`, `weights`: [K]; rows are `from` + place, where it is not −1.
  void add_up(const std::byte* from, const std::int32_t* places, const float* weights,
              std::byte* out) {
    sum_.out = out;
    sum_.count = 0;
    for (int k = 0; k < topk_; ++k) {
      if (places[k] < 0) continue;
      const auto n = static_cast<std::size_t>(sum_.count++);
      rows_[n] = from + static_cast<std::size_t>(places[k]) * row_bytes_;
      weights_[n] = weights[k];
    }
    kernels().sum_rows(sum_);
  }

 private:
  int topk_;
  std::size_t row_bytes_;
  std::array<const void*, kMaxTopk> rows_{};
  std::array<float, kMaxTopk> weights_{};
  SumRows sum_{};
};

/// Rows that others make meanwhile.
class RowsBeingMade {
 public:
  RowsBeingMade(const LatencyMemory& memory, const LatencyCombineCall& call)
      : engine_(memory.engine), rows_(memory.output_rows()), began_(call.began) {
    if (call.signals) signals_ = &*call.signals;
  }
  /// `place`: of all experts' rows.
  void await(std::int32_t place) const {
    if (signals_ == nullptr) return;
    const std::int64_t expert = place / rows_, block = place % rows_ / signals_->block_rows;
    const std::int64_t at = expert * signals_->made.strides[0] + block;
    auto* word = const_cast<std::int32_t*>(static_cast<const std::int32_t*>(signals_->made.data));
    const std::atomic_ref<std::int32_t> made(word[at]);
    // acquire: the block's rows are there once its maker's release store is seen.
    if (value_of(made.load(std::memory_order_acquire)) >= signals_->threshold) return;
    wait_for(made, expert, block);
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::int64_t value_of(std::int32_t signal) const {
    return signals_->is_unsigned ? std::int64_t{static_cast<std::uint32_t>(signal)} : signal;
  }
  void wait_for(const std::atomic_ref<std::int32_t>& made, std::int64_t expert,
                std::int64_t block) const {
    constexpr std::chrono::microseconds kSpins{200}, kNap{50};
    const auto start = Clock::now();
    unsigned naps = 0;
    for (;;) {
      const std::int64_t seen = value_of(made.load(std::memory_order_acquire));
      if (seen >= signals_->threshold) return;
      const auto now = Clock::now();
      if (now - began_ > engine_.config().deadline) refuse_late(expert, block, seen);
      if (now - start < kSpins) {
        std::this_thread::yield();
        continue;
      }
      if (++naps % 1000 == 0 && engine_.config().on_wait) engine_.config().on_wait();
      std::this_thread::sleep_for(kNap);
    }
  }
  [[noreturn]] void refuse_late(std::int64_t expert, std::int64_t block, std::int64_t seen) const {
    throw Error(
        ErrorKind::deadline,
        "latency combine: signals: block " + std::to_string(block) + " of local expert " +
            std::to_string(expert) + " of rank " + std::to_string(engine_.rank()) +
            " was not made within the deadline of " + exact_seconds(engine_.config().deadline) +
            ": got signal " + std::to_string(seen) + ", expected " +
            std::to_string(signals_->threshold) +
            " or more; start what makes the rows before the call, or give the group a longer "
            "deadline",
        {engine_.rank(), engine_.rank(), "latency combine: signals", 0, 0, 0});
  }

  const HostEngine& engine_;
  std::int64_t rows_;
  Clock::time_point began_;  // the call: all its waits share one deadline
  const BlockSignals* signals_ = nullptr;
};

/// Rows on their way to one owner, where they lie one behind the other: inside the domain each
/// straight to its place, beyond it many in one write.
class SumWriter {
 public:
  /// `made`: room for rows that are made here, as many as are written at once.
  SumWriter(FabricReach& reach, int owner, bool crosses, protocol::Place to, std::size_t row_bytes,
            std::uint64_t tag, std::span<std::byte> made)
      : reach_(reach),
        owner_(owner),
        crosses_(crosses),
        to_(to),
        row_bytes_(row_bytes),
        tag_(tag),
        made_(made) {}

  /// Where the next row may be made.
  std::byte* room() { return made_.data() + rows_ * row_bytes_; }
  /// `row`: the caller's until `flush`, or in `room`.
  void add(const std::byte* row) {
    if (!crosses_) {
      reach_.write(owner_, to_, row, row_bytes_, tag_);
      to_.offset += row_bytes_;
      return;
    }
    pieces_.push_back({row, row_bytes_});
    if (++rows_ == made_.size() / row_bytes_) flush();
  }
  void flush() {
    if (rows_ == 0) return;
    reach_.write_pieces(owner_, to_, pieces_, tag_);
    to_.offset += rows_ * row_bytes_;
    rows_ = 0;
    pieces_.clear();
  }

 private:
  FabricReach& reach_;
  int owner_;
  bool crosses_;
  protocol::Place to_;
  std::size_t row_bytes_;
  std::uint64_t tag_;
  std::span<std::byte> made_;
  std::size_t rows_ = 0;
  std::vector<fabric::Piece> pieces_{};
};

/// The row as it crosses, in the call's format; if it has to be made, in `room`.
const std::byte* encode_sum(const LatencyMemory& memory, const LatencyCombineCall& call,
                            const std::byte* row, std::byte* room) {
  if (call.format == CombineFormat::e4m3) {
    QuantizeRow quantize;
    quantize.row = row;
    quantize.dtype = memory.config.dtype;
    quantize.columns = memory.config.hidden;
    quantize.codes = room;
    quantize.scales = room + memory.combine_row.e4m3_scales;
    kernels().quantize_row(quantize);
    return room;
  }
  if (call.format == CombineFormat::logfmt10) {
    kernels().encode_logfmt(
        {row, memory.config.dtype, memory.config.hidden, room, memory.combine_row});
    return room;
  }
  return row;
}

/// Where the owner wants them. Throws Error(mismatch) unless so many rows have room there.
std::size_t sums_there(const LatencyMemory& memory, const Exchange& exchange, int owner,
                       std::size_t rows) {
  const std::uint64_t first = exchange.sums_there[static_cast<std::size_t>(owner)];
  // Not first + rows: that could overflow.
  if (first > memory.sum_places() || rows > memory.sum_places() - first) {
    memory.engine.channel().throw_violation("latency combine: rows", owner,
                                            "wants " + std::to_string(rows) + " rows at place " +
                                                std::to_string(first) + " of " +
                                                std::to_string(memory.sum_places()));
  }
  return memory.sums_offset(exchange.generation, first);
}

/// The weights of an arrival's slots, [K].
const float* weights_of(const LatencyMemory& memory, const Exchange& exchange,
                        const LatencyCombineCall& call, std::size_t n) {
  if (!call.weights_follow) {
    return exchange.slot_weights.data() + n * static_cast<std::size_t>(memory.config.topk);
  }
  const Arrival& arrival = exchange.arrivals[n];
  return reinterpret_cast<const float*>(
      memory.segment.data +
      memory.weights_offset(exchange.generation, arrival.source, arrival.token));
}

}  // namespace

std::size_t send_sums_to(LatencyMemory& memory, SumRoom& room, const Exchange& exchange,
                         const LatencyCombineCall& call, const ConstTensorView& rows, int owner) {
  const auto* from = static_cast<const std::byte*>(rows.data);
  const bool fanned_out = exchange.options.order == RowOrder::expert_major;
  const auto topk = static_cast<std::size_t>(memory.config.topk);
  const auto arrivals = std::ranges::equal_range(exchange.arrivals, owner, {}, &Arrival::source);
  const auto first = static_cast<std::size_t>(arrivals.begin() - exchange.arrivals.begin());
  std::span<const std::int32_t> places;  // [arrivals, K]
  if (fanned_out) {
    places = std::span(exchange.slot_rows).subspan(first * topk, arrivals.size() * topk);
  }
  const auto slots = std::ranges::count_if(places, [](std::int32_t place) { return place >= 0; });
  const std::size_t count = call.by_rank ? arrivals.size() : static_cast<std::size_t>(slots);
  SumWriter out(memory.reach, owner, memory.crosses(owner),
                memory.at(sums_there(memory, exchange, owner, count)),
                memory.sum_bytes(call.format), protocol::Delivery<>::tag(exchange.generation),
                room.rows);
  const auto send = [&](const std::byte* row) {
    out.add(encode_sum(memory, call, row, out.room()));
  };
  SlotSum sum(memory.config);
  const RowsBeingMade made(memory, call);
  for (std::size_t n = 0; n < arrivals.size(); ++n) {
    const std::span own = fanned_out ? places.subspan(n * topk, topk) : places;
    for (const std::int32_t place : own) {
      if (place >= 0) made.await(place);
    }
    if (!fanned_out) {
      send(from + memory.slot(0, owner, arrivals[n].row) * memory.plain_bytes());
    } else if (call.by_rank) {
      std::byte* row = call.format == CombineFormat::as_is ? out.room() : room.one.data();
      sum.add_up(from, own.data(), weights_of(memory, exchange, call, first + n), row);
      send(row);
    } else {
      for (const std::int32_t place : own) {
        if (place >= 0) send(from + static_cast<std::size_t>(place) * memory.plain_bytes());
      }
    }
  }
  out.flush();
  return count * memory.sum_bytes(call.format);
}

}  // namespace ferry::host
