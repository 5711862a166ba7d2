// Markers for functions that host and device share. Everything in src/core/ that a kernel may call
// carries one of them; under a host compiler they cost nothing.
#pragma once

#if defined(__CUDACC__)
/// A function that both the host and the device may call.
#define FERRY_FN __host__ __device__ inline
/// The same, always inlined: for the few lines inside a hot loop, which must not stop the
/// vectoriser nor keep a caller's target attribute from reaching them.
#define FERRY_INLINE_FN __host__ __device__ inline __attribute__((always_inline))
/// A template over who runs it: threads of a block for nvcc, one thread for a host compiler.
#define FERRY_TEAM_FN __device__ inline
#else
#define FERRY_FN inline
#define FERRY_INLINE_FN inline __attribute__((always_inline))
#define FERRY_TEAM_FN inline
#endif

/// The pointer is the only way to its memory during the call.
#define FERRY_RESTRICT __restrict__
