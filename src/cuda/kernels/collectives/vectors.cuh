// 16-byte vectors of tensors that may begin and end anywhere, and their reduction: the definition
// of the host engine (host/collectives/reduce.cpp), bit for bit.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/kernels/base/access.cuh"
#include "cuda/kernels/base/accumulate.cuh"
#include "ferry/collectives.hpp"

namespace ferry::cuda::device {

inline constexpr int kVectorBytes = 16;

__device__ __forceinline__ std::int64_t vectors_of(std::int64_t bytes) {
  return (bytes + kVectorBytes - 1) / kVectorBytes;
}

// Past the L1 cache, which peers do not write to.
__device__ __forceinline__ void store_vector(std::byte* at, const uint4& vector) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(vector.x),
               "r"(vector.y), "r"(vector.z), "r"(vector.w)
               : "memory");
}
__device__ __forceinline__ uint4 load_vector(const std::byte* at) {
  uint4 vector;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
               : "l"(at)
               : "memory");
  return vector;
}

/// Up to 16 bytes; what is missing is 0.
__device__ __noinline__ inline uint4 load_bytes(const std::byte* at, std::int64_t bytes) {
  std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kVectorBytes; ++i) {
    if (i < bytes) {
      const auto byte =
          static_cast<std::uint32_t>(*reinterpret_cast<const volatile unsigned char*>(at + i));
      words[i / 4] |= byte << (i % 4 * 8);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}
__device__ __noinline__ inline void store_bytes(std::byte* at, std::int64_t bytes, uint4 vector) {
  const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < kVectorBytes; ++i) {
    if (i < bytes) {
      *reinterpret_cast<volatile unsigned char*>(at + i) =
          static_cast<unsigned char>(words[i / 4] >> (i % 4 * 8));
    }
  }
}

__device__ __forceinline__ bool is_aligned(const std::byte* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0;
}
/// Vector `v` of `bytes` bytes, of this or of another rank's memory.
__device__ __forceinline__ uint4 load_at(const std::byte* data, std::int64_t bytes,
                                         std::int64_t v) {
  const std::byte* at = data + v * kVectorBytes;
  const std::int64_t rest = bytes - v * kVectorBytes;
  return rest >= kVectorBytes && is_aligned(at) ? load_vector(at) : load_bytes(at, rest);
}
__device__ __forceinline__ void store_at(std::byte* data, std::int64_t bytes, std::int64_t v,
                                         const uint4& vector) {
  std::byte* at = data + v * kVectorBytes;
  const std::int64_t rest = bytes - v * kVectorBytes;
  if (rest >= kVectorBytes && is_aligned(at))
    store_vector(at, vector);
  else
    store_bytes(at, rest, vector);
}
/// The same of a vector that is known to be whole and aligned, or not.
template <bool kWhole>
__device__ __forceinline__ uint4 load_as(const std::byte* data, std::int64_t bytes,
                                         std::int64_t v) {
  if constexpr (kWhole)
    return load_vector(data + v * kVectorBytes);
  else
    return load_at(data, bytes, v);
}
template <bool kWhole>
__device__ __forceinline__ void store_as(std::byte* data, std::int64_t bytes, std::int64_t v,
                                         const uint4& vector) {
  if constexpr (kWhole)
    store_vector(data + v * kVectorBytes, vector);
  else
    store_at(data, bytes, v, vector);
}

/// Which vectors a thread takes: first, first + step, … before those of `bytes` bytes end.
struct Walk {
  std::int64_t first = 0;
  std::int64_t step = 1;
};

/// Calls `loop(whole, begin, end)` for the vectors that are whole and aligned (std::true_type), if
/// `aligned`, then for the rest.
template <class Loop>
__device__ __forceinline__ void whole_then_rest(const Walk& walk, std::int64_t bytes, bool aligned,
                                                const Loop& loop) {
  const std::int64_t whole = aligned ? bytes / kVectorBytes : 0;
  loop(std::true_type{}, walk.first, whole);
  const std::int64_t passed =
      walk.first < whole ? (whole - walk.first + walk.step - 1) / walk.step : 0;
  loop(std::false_type{}, walk.first + passed * walk.step, vectors_of(bytes));
}

/// Copies; several loads of a thread are on their way at once.
__device__ __forceinline__ void copy_vectors(const Walk& walk, const std::byte* from, std::byte* to,
                                             std::int64_t bytes) {
  const bool aligned = is_aligned(from) && is_aligned(to);
  whole_then_rest(walk, bytes, aligned, [&](auto whole, std::int64_t begin, std::int64_t end) {
    constexpr bool kWhole = decltype(whole)::value;
    constexpr int kTogether = kWhole ? 8 : 1;
#pragma unroll 1
    for (std::int64_t v = begin; v < end; v += kTogether * walk.step) {
      uint4 vectors[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (v + u * walk.step < end) vectors[u] = load_as<kWhole>(from, bytes, v + u * walk.step);
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (v + u * walk.step < end) store_as<kWhole>(to, bytes, v + u * walk.step, vectors[u]);
      }
    }
  });
}

/// The elements of one vector while they are reduced: floats in fp32, integers as they are.
template <class T>
struct Reducing {
  static constexpr bool kFloat = !std::is_integral_v<T>;
  static constexpr int kCount = kVectorBytes / static_cast<int>(sizeof(T));
  using Element = std::conditional_t<kFloat, float, T>;
  Element elements[kCount];

  __device__ __forceinline__ static void unpack(const uint4& vector, Element* to) {
    if constexpr (kFloat) {
      const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          to[i] = __uint_as_float(words[i]);
        } else {
          to[2 * i] = Pair<T>::low(words[i]);
          to[2 * i + 1] = Pair<T>::high(words[i]);
        }
      }
    } else {
      std::memcpy(to, &vector, sizeof(vector));
    }
  }

  __device__ __forceinline__ static Element sum(Element a, Element b) {
    if constexpr (kFloat)
      return __fadd_rn(a, b);
    else  // unsigned arithmetic wraps
      return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
  __device__ __forceinline__ static Element product(Element a, Element b) {
    if constexpr (kFloat)
      return __fmul_rn(a, b);
    else
      return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
  /// Of min and max: an element that is NaN wins.
  __device__ __forceinline__ static Element apply(ReduceOp op, Element a, Element b) {
    switch (op) {
      case ReduceOp::product: return product(a, b);
      case ReduceOp::min: return a < b || a != a ? a : b;
      default: return a > b || a != a ? a : b;
    }
  }
  __device__ __forceinline__ static bool adds(ReduceOp op) {
    return op == ReduceOp::sum || op == ReduceOp::mean;
  }

  /// Of rank 0. A sum of floats begins at +0, so that −0 alone gives +0.
  __device__ __forceinline__ void begin(ReduceOp op, const uint4& vector) {
    unpack(vector, elements);
    if constexpr (kFloat) {
      if (!adds(op)) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) elements[i] = sum(Element{}, elements[i]);
    }
  }
  /// Of the next rank.
  __device__ __forceinline__ void add(ReduceOp op, const uint4& vector) {
    Element other[kCount];
    unpack(vector, other);
    if (adds(op)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) elements[i] = sum(elements[i], other[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) elements[i] = apply(op, elements[i], other[i]);
    }
  }
  __device__ __forceinline__ uint4 end(ReduceOp op, int ranks) {
    if constexpr (kFloat) {
      if (op == ReduceOp::mean) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          elements[i] = __fdiv_rn(elements[i], static_cast<float>(ranks));
        }
      }
      return round_vector<T>(elements);
    } else {
      uint4 vector;
      std::memcpy(&vector, elements, sizeof(vector));
      return vector;
    }
  }
};

/// Reduces `bytes` bytes of every rank: `load(whole, rank, v)`, `store(whole, v, vector)`, where
/// `whole` says that the vector can be moved as one (load_as); `aligned`: whether any can. Loads of
/// the next rank are on their way while those of one are added, in ascending order of the ranks.
template <class T, int kMost, class Load, class Store>
__device__ __forceinline__ void reduce_vectors(ReduceOp op, int ranks, const Walk& walk,
                                               std::int64_t bytes, bool aligned, const Load& load,
                                               const Store& store) {
  whole_then_rest(walk, bytes, aligned, [&](auto whole, std::int64_t begin, std::int64_t end) {
    constexpr int kTogether = decltype(whole)::value ? kMost : 1;
#pragma unroll 1
    for (std::int64_t v = begin; v < end; v += kTogether * walk.step) {
      Reducing<T> sums[kTogether];
      uint4 next[kTogether];
      const auto load_all = [&](int rank) {
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          next[u] = uint4{0, 0, 0, 0};
          if (v + u * walk.step < end) next[u] = load(whole, rank, v + u * walk.step);
        }
      };
      load_all(0);
#pragma unroll 1
      for (int rank = 0; rank < ranks; ++rank) {
        uint4 now[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) now[u] = next[u];
        if (rank + 1 < ranks) load_all(rank + 1);
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          if (rank == 0)
            sums[u].begin(op, now[u]);
          else
            sums[u].add(op, now[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (v + u * walk.step < end) store(whole, v + u * walk.step, sums[u].end(op, ranks));
      }
    }
  });
}

}  // namespace ferry::cuda::device
