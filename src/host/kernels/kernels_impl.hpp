// Bodies of the kernels. Included once by each kernels_<set>.cpp, inside an anonymous namespace and
// after the target of that set was chosen: plain loops, vectorised by the compiler. Everything they
// call is always inlined, so no code of one instruction set can be linked into another.
// No include guard on purpose; the includes are in kernels_prelude.hpp.

constexpr std::int64_t kTile = 512;  // columns summed at a time: accumulators stay in L1

template <class T>
void add_tile(float* FERRY_RESTRICT acc, const T* FERRY_RESTRICT row, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) acc[i] += to_float(row[i]);
}

template <class T>
void fma_tile(float* FERRY_RESTRICT acc, const T* FERRY_RESTRICT row, float weight,
              std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    acc[i] = __builtin_fmaf(weight, to_float(row[i]), acc[i]);
  }
}

template <class T>
void round_tile(T* FERRY_RESTRICT out, const float* FERRY_RESTRICT acc, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = from_float<T>(acc[i]);
}

template <class T>
void sum_rows_of(const SumRows& sum) {
  alignas(64) float acc[kTile];
  for (std::int64_t at = 0; at < sum.columns; at += kTile) {
    const std::int64_t count = sum.columns - at < kTile ? sum.columns - at : kTile;
    for (std::int64_t i = 0; i < count; ++i) acc[i] = 0.0f;
    for (std::int64_t r = 0; r < sum.count; ++r) {
      const T* row = static_cast<const T*>(sum.rows[r]) + at;
      if (sum.weights != nullptr) {
        fma_tile(acc, row, sum.weights[r], count);
      } else {
        add_tile(acc, row, count);
      }
    }
    if (sum.bias0 != nullptr) add_tile(acc, static_cast<const T*>(sum.bias0) + at, count);
    if (sum.bias1 != nullptr) add_tile(acc, static_cast<const T*>(sum.bias1) + at, count);
    round_tile(static_cast<T*>(sum.out) + at, acc, count);
  }
}

void sum_rows(const SumRows& sum) {
  switch (sum.dtype) {
    case Dtype::bf16: return sum_rows_of<Bf16>(sum);
    case Dtype::f16: return sum_rows_of<Fp16>(sum);
    default: return sum_rows_of<float>(sum);
  }
}

void quantize(const QuantizeRow& q) {
  auto* codes = static_cast<E4m3*>(q.codes);
  const auto columns = static_cast<std::size_t>(q.columns);
  switch (q.dtype) {
    case Dtype::bf16:
      return quantize_row(static_cast<const Bf16*>(q.row), columns, codes, q.scales,
                          q.round_scale);
    case Dtype::f16:
      return quantize_row(static_cast<const Fp16*>(q.row), columns, codes, q.scales,
                          q.round_scale);
    default:
      return quantize_row(static_cast<const float*>(q.row), columns, codes, q.scales,
                          q.round_scale);
  }
}
