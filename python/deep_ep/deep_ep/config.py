"""Tuning of one call, and the defaults for each number of ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from deep_ep.environment import topk_idx_dtype
from deep_ep.errors import refuse, require, require_integer

topk_idx_t = topk_idx_dtype()

RANKS_OF_A_HOST = 8
"""Ranks that the interface counts as one NVLink domain, and its channels as half its SMs."""


class Config:
    """How many SMs a call uses, and how the original cuts rows into chunks.

    Ferry uses `num_sms` on GPUs and needs no chunks; the sizes are checked, kept, and used for the
    hints, which tell what the original would register.
    """

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.num_sms = require_integer("Config", "num_sms", num_sms, 0, "0 or more")
        nvl_send, nvl_recv, rdma_send, rdma_recv = (
            require_integer("Config", f"num_max_{name}_tokens", value, 1, "at least 1")
            for name, value in (
                ("nvl_chunked_send", num_max_nvl_chunked_send_tokens),
                ("nvl_chunked_recv", num_max_nvl_chunked_recv_tokens),
                ("rdma_chunked_send", num_max_rdma_chunked_send_tokens),
                ("rdma_chunked_recv", num_max_rdma_chunked_recv_tokens),
            )
        )
        self.num_max_nvl_chunked_send_tokens = nvl_send
        self.num_max_nvl_chunked_recv_tokens = nvl_recv
        self.num_max_rdma_chunked_send_tokens = rdma_send
        if nvl_send >= nvl_recv:
            refuse("Config", "num_max_nvl_chunked_send_tokens", nvl_send, f"below {nvl_recv}")
        rdma_recv = _round_up(rdma_recv, rdma_send)
        self.num_max_rdma_chunked_recv_tokens = rdma_recv
        if rdma_send > rdma_recv // 2:
            refuse(
                "Config",
                "num_max_rdma_chunked_send_tokens",
                rdma_send,
                f"at most half of num_max_rdma_chunked_recv_tokens, {rdma_recv}",
            )

    @property
    def channels(self) -> int:
        """Two SMs serve a channel: tokens are cut into so many equal parts."""
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Bytes that the original registers for peers on one host."""
        call = "get_nvl_buffer_size_hint"
        row, ranks = self._shape(call, hidden_bytes, num_ranks)
        domains, peers = domains_of(ranks), min(ranks, RANKS_OF_A_HOST)
        row += 8 + 128 * topk_idx_t.itemsize + 128 * 4 + 128 * 4
        rings = self.channels * peers
        flags = rings * (2 * domains + 3) * 4
        return _round_up(flags + rings * self.num_max_nvl_chunked_recv_tokens * row, 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        """Bytes that the original registers for the network; 0 for ranks of one host."""
        call = "get_rdma_buffer_size_hint"
        row, ranks = self._shape(call, hidden_bytes, num_ranks)
        if ranks <= RANKS_OF_A_HOST:
            return 0
        domains = domains_of(ranks)
        row += 8 + 128 * topk_idx_t.itemsize + 128 * 4 + 128 * 4 + 16
        rings = self.channels * domains
        flags = rings * (RANKS_OF_A_HOST * 2 + 2) * 2 * 4
        return _round_up(flags + 2 * rings * self.num_max_rdma_chunked_recv_tokens * row, 128)

    def _shape(self, call: str, hidden_bytes: Any, num_ranks: Any) -> tuple[int, int]:
        """Both, as plain numbers."""
        row = require_integer(call, "hidden_bytes", hidden_bytes, 0, "0 or more")
        ranks = require_integer(call, "num_ranks", num_ranks, 1, "at least 1")
        if ranks > RANKS_OF_A_HOST:
            require(self.num_sms % 2 == 0, call, "num_sms", self.num_sms, "an even number")
        return row, ranks

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"Config({values})"


def domains_of(num_ranks: int) -> int:
    """Hosts of 8 ranks, as the interface counts them; 1 where 8 does not divide the ranks."""
    if num_ranks % RANKS_OF_A_HOST != 0:
        return 1
    return num_ranks // RANKS_OF_A_HOST


MOST_RANKS = 160
"""The last number of ranks with defaults."""


class _Chunks(NamedTuple):
    nvl_send: int
    nvl_recv: int
    rdma_send: int
    rdma_recv: int


_DISPATCH = {
    2: _Chunks(24, 256, 6, 128),
    4: _Chunks(6, 256, 6, 128),
    8: _Chunks(6, 256, 6, 128),
    16: _Chunks(36, 288, 20, 128),
    64: _Chunks(32, 288, 8, 128),
    96: _Chunks(20, 480, 12, 128),
    128: _Chunks(20, 560, 12, 128),
    144: _Chunks(32, 720, 12, 128),
    160: _Chunks(28, 720, 12, 128),
}
_COMBINE = {
    2: _Chunks(10, 256, 6, 128),
    4: _Chunks(9, 256, 6, 128),
    8: _Chunks(4, 256, 6, 128),
    16: _Chunks(4, 288, 12, 128),
    64: _Chunks(1, 288, 8, 128),
    96: _Chunks(1, 480, 8, 128),
    128: _Chunks(1, 560, 8, 128),
    144: _Chunks(2, 720, 8, 128),
    160: _Chunks(2, 720, 8, 128),
}


def dispatch_config(num_ranks: int, num_sms: int) -> Config:
    """The default of dispatch: that of the next number of ranks in the table."""
    return _default("get_dispatch_config", _DISPATCH, num_ranks, num_sms)


def combine_config(num_ranks: int, num_sms: int) -> Config:
    """The same of combine."""
    return _default("get_combine_config", _COMBINE, num_ranks, num_sms)


def _default(call: str, table: dict[int, _Chunks], num_ranks: int, num_sms: int) -> Config:
    num_ranks = require_integer(call, "num_ranks", num_ranks, None, f"1 to {MOST_RANKS}")
    listed = [ranks for ranks in table if ranks >= num_ranks]
    assert num_ranks >= 1 and listed, f"Unsupported number of EP ranks: {num_ranks}"
    return Config(num_sms, *table[listed[0]])


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
