"""Routes that a group recorded, for `ferry plan` and `ferry simulate`.

A file, little-endian: the eight letters FERRYRT1, u32 rank, u32 ranks, u64 experts; then for each
call u32 tokens, u32 topk, and i32 [tokens, topk]: global expert ids, -1 where a slot is not used.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    import numpy as np
    import numpy.typing as npt

MAGIC = b"FERRYRT1"


def routes_path(file: str | Path, rank: int) -> Path:
    """Where a rank records: the rank is added to the name."""
    from pathlib import Path  # which takes some milliseconds

    return Path(f"{file}.{rank}")


class RouteFile:
    """What a rank writes. The file is whole after each call."""

    def __init__(self, file: str | Path, rank: int, ranks: int, experts: int) -> None:
        self._file = routes_path(file, rank).open("wb")
        self._file.write(MAGIC + struct.pack("<IIQ", rank, ranks, experts))
        self._file.flush()

    def add(self, topk_idx: Any) -> None:
        import numpy as np

        on_cpu = topk_idx.detach().cpu() if hasattr(topk_idx, "detach") else topk_idx
        ids = np.ascontiguousarray(np.asarray(on_cpu), "<i4")
        self._file.write(struct.pack("<II", *ids.shape) + ids.tobytes())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_routes(file: str | Path, rank: int) -> list[npt.NDArray[np.int32]]:
    """The routes that a rank recorded: i32 [T, K] of each call."""
    import numpy as np

    data = routes_path(file, rank).read_bytes()
    if data[:8] != MAGIC:
        raise ValueError(f"{routes_path(file, rank)}: not recorded by Group.record_routes")
    calls = []
    at = 24
    while at < len(data):
        tokens, topk = struct.unpack_from("<II", data, at)
        calls.append(np.frombuffer(data, "<i4", tokens * topk, at + 8).reshape(tokens, topk))
        at += 8 + 4 * tokens * topk
    return calls
