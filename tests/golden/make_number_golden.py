"""Writes what numpy and ml_dtypes say about Ferry's number formats, for number_golden_test.

    python make_number_golden.py OUTPUT

The file (little-endian) is the magic "FERRYNUM", a uint32 version and a sequence of arrays, each a
uint64 count followed by its elements, in the order in which main() writes them.

Where ml_dtypes differs by design, inputs are clamped first: its e4m3fn overflows to NaN and its
e5m2 to infinity, while fp8 of Ferry saturates. NaNs are compared as NaNs, whatever their bits.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

VERSION = 1
BLOCK = 128
FP8 = ((ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0))


def narrow_types():
    """The formats in the order of the file: dtype, bits, largest value of a saturating one."""
    return (
        (np.dtype(ml_dtypes.bfloat16), np.uint16, None),
        (np.dtype(np.float16), np.uint16, None),
        (np.dtype(ml_dtypes.float8_e4m3fn), np.uint8, 448.0),
        (np.dtype(ml_dtypes.float8_e5m2), np.uint8, 57344.0),
    )


def widened(dtype, bits):
    """Every code of a format, as floats."""
    codes = np.arange(np.iinfo(bits).max + 1, dtype=bits)
    return codes.view(dtype).astype(np.float32)


def boundary_floats():
    """Every value of every format, every middle of two, their neighbours, and random bits."""
    parts = []
    for dtype, bits, _ in narrow_types():
        values = widened(dtype, bits)
        values = np.sort(values[np.isfinite(values)]).astype(np.float64)
        middles = (values[1:] + values[:-1]) / 2
        if bits is np.uint16:  # thin out: the C++ tests take them all
            values, middles = values[::3], middles[::2]
        for centre in (values.astype(np.float32), middles.astype(np.float32)):
            parts += [
                centre,
                np.nextafter(centre, np.float32(-np.inf)),
                np.nextafter(centre, np.float32(np.inf)),
            ]
    random = np.random.default_rng(20261121)
    parts.append(random.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32))
    special = [0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
    special = np.array(special, dtype=np.uint32)
    parts += [special.view(np.float32), (special | np.uint32(0x80000000)).view(np.float32)]
    return np.concatenate(parts)


def narrowed(values, dtype, bits, largest):
    if largest is not None:
        values = np.clip(values, np.float32(-largest), np.float32(largest))
    return values.astype(dtype).view(bits)


def blocks():
    """Rows of 128 finite floats of many sizes, some with NaN."""
    random = np.random.default_rng(7)
    size = 10.0 ** random.uniform(-8, 36, (600, 1))
    rows = (random.standard_normal((600, BLOCK)) * size).astype(np.float32)
    rows[::2] = random.standard_normal((300, BLOCK)).astype(np.float32)
    rows[5, 3] = rows[6, :] = np.nan
    rows[7, :] = 0
    # An amax that is exactly, and one step beyond, a power of two times the largest value.
    for i, amax in enumerate((1.75, 1.75 * 2.0**20, 448.0, 57344.0)):
        rows[10 + 2 * i, :] = amax
        rows[11 + 2 * i, :] = np.nextafter(np.float32(amax), np.float32(np.inf))
    return rows


def quantized(rows, dtype, largest, round_scale):
    """Scales and codes by the definition in docs/design.md, in numpy's float32."""
    amax = np.fmax.reduce(np.abs(rows), axis=1, initial=np.float32(1e-4)).astype(np.float32)
    if round_scale:
        fraction, exponent = np.frexp(amax.astype(np.float64) / largest)
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)
        scale = np.ldexp(1.0, exponent).astype(np.float32)
        inv = np.ldexp(1.0, -exponent).astype(np.float32)
    else:
        scale = amax / np.float32(largest)
        inv = np.float32(largest) / amax
    return scale, narrowed(rows * inv[:, None], np.dtype(dtype), np.uint8, largest)


def main(path):
    with np.errstate(all="ignore"), Path(path).open("wb") as file:
        file.write(b"FERRYNUM" + np.uint32(VERSION).tobytes())

        def write(array):
            file.write(np.uint64(array.size).tobytes() + np.ascontiguousarray(array).tobytes())

        inputs = boundary_floats()
        write(inputs)
        for dtype, bits, largest in narrow_types():
            write(narrowed(inputs, dtype, bits, largest))
            write(widened(dtype, bits))
        rows = blocks()
        write(rows)
        for dtype, largest in FP8:
            for round_scale in (False, True):
                scale, codes = quantized(rows, dtype, largest, round_scale)
                write(scale)
                write(codes)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
