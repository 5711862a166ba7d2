"""Ferry's arithmetic in NumPy, from docs/design.md ("Arithmetic") and docs/latency.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8),
}
SUM_DTYPES = ("f32", "bf16", "f16")
BLOCK = 128  # channels that share a scale
LARGEST = np.float32(448)
SMALLEST_AMAX = np.float32(1e-4)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    drawn: Array = np.asarray(rng.standard_normal(shape)).astype(np.float32)
    return drawn


def wide(values: Array) -> Array:
    """The exact values as f32."""
    return values.astype(np.float32)


def rounded(values: Array, dtype: Any) -> Array:
    """f32 to a dtype, to nearest even."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


def fma(a: Array, b: Array, c: Array) -> Array:
    """f32 a * b + c with one rounding. The product is exact in f64; the sum is rounded to odd
    there, after which rounding to f32 is the only one that counts."""
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        addend = np.broadcast_to(c.astype(np.float64), product.shape)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        bits = total.view(np.int64)
        inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & (bits % 2 == 0)
        away = (error > 0) == (total > 0)
        odd = np.where(inexact, np.where(away, bits + 1, bits - 1), bits).view(np.float64)
        result: Array = odd.astype(np.float32)
        return result


def add(total: Array, more: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(total + more)


class Quantised(NamedTuple):
    codes: Array  # e4m3 [T, H]
    scales: Array  # f32 [T, ceil(H / 128)]

    def values(self) -> Array:
        """f32: a code times its scale, rounded."""
        wide_scales = np.repeat(self.scales, BLOCK, axis=1)[:, : self.codes.shape[1]]
        with np.errstate(all="ignore"):
            return np.asarray(wide(self.codes) * wide_scales)


def quantise(rows: Array, power_of_two: bool = False) -> Quantised:
    """Each 128 channels: amax is at least 1e-4, NaN does not count, infinity counts as the largest
    float; scale = amax / 448, the code is x * (448 / amax), saturating."""
    x = wide(rows)
    tokens, hidden = x.shape
    blocks = -(-hidden // BLOCK)
    codes = np.zeros((tokens, hidden), DTYPES["e4m3"])
    scales = np.zeros((tokens, blocks), np.float32)
    most = np.finfo(np.float32).max
    for block in range(blocks):
        part = x[:, block * BLOCK : (block + 1) * BLOCK]
        magnitudes = np.minimum(np.where(np.isnan(part), 0, np.abs(part)), most)
        amax = np.maximum(magnitudes.max(axis=1), SMALLEST_AMAX).astype(np.float32)
        scale, inverse = amax / LARGEST, LARGEST / amax
        if power_of_two:  # the least 2^n of at least amax / 448; 448 = 0.875 * 2^9
            mantissa, exponent = np.frexp(amax)
            n = exponent - 9 + (mantissa > 0.875)
            scale, inverse = (np.ldexp(np.float32(1), sign * n) for sign in (1, -1))
        scales[:, block] = scale
        with np.errstate(all="ignore"):
            scaled = np.clip(part * inverse[:, None], -LARGEST, LARGEST)
            codes[:, block * BLOCK : (block + 1) * BLOCK] = rounded(scaled, DTYPES["e4m3"])
    return Quantised(codes, scales)


def packed_exponents(scales: Array) -> Array:
    """Powers of two as bytes, four in an i32, the first in the lowest; those of no block are 0."""
    exponents = (np.ascontiguousarray(scales).view(np.int32) >> 23).astype(np.uint8)
    words = -(-scales.shape[1] // 4)
    whole = np.zeros((len(scales), 4 * words), np.uint8)
    whole[:, : scales.shape[1]] = exponents
    return whole.view("<i4")


def logfmt_error(rows: Array) -> Array:
    """The most that LogFMT-10 may change each value of rows [T, H], by docs/latency.md."""
    x = np.abs(rows.astype(np.float64))
    bound = np.zeros_like(x)
    x = np.where(np.isnan(x), np.inf, x)
    for at in range(0, x.shape[1], BLOCK):
        part = x[:, at : at + BLOCK]
        finite = np.isfinite(part)  # infinity and NaN come back as they are
        counts = finite & (part >= 2.0**-126)
        high = np.where(counts, part, 0).max(axis=1, keepdims=True)
        least = np.where(counts, part, np.inf).min(axis=1, keepdims=True)
        lowest = np.minimum(np.maximum(least, np.maximum(high * 2.0**-32, 2.0**-126)), high)
        octaves = np.log2(np.where(high > 0, high, 1) / np.where(high > 0, lowest, 1))
        relative = (2 ** (octaves / 505) - 1) / 2 + 5e-6
        bound[:, at : at + BLOCK] = np.where(
            finite, np.where(part >= lowest, np.where(finite, part, 0) * relative, lowest / 2), 0
        )
    return bound


def same_bits(got: Array, expected: Array) -> bool:
    """All NaNs are equal; nothing else is equal to what has other bits."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    unsigned = f"u{got.dtype.itemsize}"
    equal = np.ascontiguousarray(got).view(unsigned) == np.ascontiguousarray(expected).view(
        unsigned
    )
    if got.dtype.kind in "fV" and not equal.all():
        equal |= np.isnan(wide(got)) & np.isnan(wide(expected))
    return bool(equal.all())
