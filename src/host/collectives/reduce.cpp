#include "host/collectives/reduce.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "core/number.hpp"
#include "host/kernels/kernels.hpp"

namespace ferry::host {
namespace {

constexpr std::int64_t kReduceTile = 512;  // elements at a time: partial results stay in L1

/// Of min and max: an element that is NaN wins.
template <class T>
T least(T a, T b) {
  return a < b || a != a ? a : b;
}
template <class T>
T most(T a, T b) {
  return a > b || a != a ? a : b;
}

template <class T>
T apply(ReduceOp op, T a, T b) {
  // Integers wrap around: the arithmetic is unsigned.
  using Wrapped = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                              std::type_identity<T>>::type;
  switch (op) {
    case ReduceOp::product:
      if constexpr (sizeof(T) < sizeof(int))
        return static_cast<T>(unsigned{a} * unsigned{b});
      else
        return static_cast<T>(static_cast<Wrapped>(a) * static_cast<Wrapped>(b));
    case ReduceOp::min: return least(a, b);
    case ReduceOp::max: return most(a, b);
    default: return static_cast<T>(static_cast<Wrapped>(a) + static_cast<Wrapped>(b));
  }
}

template <class T, class Partial>
Partial loaded(const void* row, std::int64_t i) {
  const T value = static_cast<const T*>(row)[i];
  if constexpr (std::is_same_v<T, Partial>)
    return value;
  else
    return to_float(value);
}

/// Elements [at, at + count) of all rows, into `tile`.
template <class T, class Partial>
void reduce_tile(ReduceOp op, std::span<const void* const> rows, std::int64_t at,
                 std::int64_t count, Partial* tile) {
  const bool adds = op == ReduceOp::sum;
  for (std::int64_t i = 0; i < count; ++i) {
    // A sum of floats begins at +0, so that −0 alone gives +0, as everywhere in Ferry.
    tile[i] = loaded<T, Partial>(rows[0], at + i);
    if (adds) tile[i] = apply(ReduceOp::sum, Partial{}, tile[i]);
  }
  for (const void* row : rows.subspan(1)) {
    for (std::int64_t i = 0; i < count; ++i) {
      tile[i] = apply(op, tile[i], loaded<T, Partial>(row, at + i));
    }
  }
}

template <class T, class Partial, class Out>
void reduce_rows(const Reduction& reduction, std::span<const void* const> rows, std::int64_t count,
                 std::span<void* const> outs) {
  std::array<Partial, kReduceTile> tile;
  std::array<Out, kReduceTile> result;
  for (std::int64_t at = 0; at < count; at += kReduceTile) {
    const std::int64_t some = std::min(kReduceTile, count - at);
    reduce_tile<T, Partial>(reduction.op, rows, at, some, tile.data());
    for (std::int64_t i = 0; i < some; ++i) {
      Partial value = tile[static_cast<std::size_t>(i)];
      if constexpr (std::is_same_v<Partial, float>) {
        result[static_cast<std::size_t>(i)] = from_float<Out>(value);
      } else {
        result[static_cast<std::size_t>(i)] = value;
      }
    }
    for (void* out : outs) {
      std::memcpy(static_cast<Out*>(out) + at, result.data(),
                  static_cast<std::size_t>(some) * sizeof(Out));
    }
  }
}

enum class Phase { ranks, domains, all };

template <class T>
void reduce_floats(const Reduction& reduction, std::span<const void* const> rows,
                   std::int64_t count, std::span<void* const> outs, Phase phase) {
  if (phase == Phase::ranks) {
    reduce_rows<T, float, float>(reduction, rows, count, outs);
  } else if (phase == Phase::domains) {
    reduce_rows<float, float, T>(reduction, rows, count, outs);
  } else {
    reduce_rows<T, float, T>(reduction, rows, count, outs);
  }
}

template <class T>
void reduce_integers(const Reduction& reduction, std::span<const void* const> rows,
                     std::int64_t count, std::span<void* const> outs) {
  reduce_rows<T, T, T>(reduction, rows, count, outs);
}

void reduce(const Reduction& reduction, std::span<const void* const> rows, std::int64_t count,
            std::span<void* const> outs, Phase phase) {
  const bool narrow = reduction.dtype == Dtype::bf16 || reduction.dtype == Dtype::f16;
  const bool mean = reduction.op == ReduceOp::mean;
  if ((mean || reduction.op == ReduceOp::sum) && (narrow || reduction.dtype == Dtype::f32)) {
    const Dtype in = phase == Phase::domains ? Dtype::f32 : reduction.dtype;
    const Dtype to = phase == Phase::ranks ? Dtype::f32 : reduction.dtype;
    kernels().sum_rows(
        {.rows = rows.data(),
         .count = static_cast<std::int64_t>(rows.size()),
         .divisor = mean && phase != Phase::ranks ? static_cast<float>(reduction.ranks) : 1,
         .out = outs.front(),
         .copy_to = outs.data() + 1,
         .copies = static_cast<std::int64_t>(outs.size()) - 1,
         .columns = count,
         .dtype = in,
         .out_dtype = to});
    return;
  }
  switch (reduction.dtype) {
    case Dtype::bf16: return reduce_floats<Bf16>(reduction, rows, count, outs, phase);
    case Dtype::f16: return reduce_floats<Fp16>(reduction, rows, count, outs, phase);
    case Dtype::i32: return reduce_integers<std::int32_t>(reduction, rows, count, outs);
    case Dtype::i64: return reduce_integers<std::int64_t>(reduction, rows, count, outs);
    case Dtype::u8: return reduce_integers<std::uint8_t>(reduction, rows, count, outs);
    default: return reduce_floats<float>(reduction, rows, count, outs, phase);
  }
}

}  // namespace

void reduce_ranks(const Reduction& reduction, std::span<const void* const> rows, std::int64_t count,
                  void* partial) {
  reduce(reduction, rows, count, {&partial, 1}, Phase::ranks);
}

void reduce_domains(const Reduction& reduction, std::span<const void* const> partials,
                    std::int64_t count, std::span<void* const> outs) {
  reduce(reduction, partials, count, outs, Phase::domains);
}

void reduce_all(const Reduction& reduction, std::span<const void* const> rows, std::int64_t count,
                std::span<void* const> outs) {
  reduce(reduction, rows, count, outs, Phase::all);
}

}  // namespace ferry::host
