"""enable_shrink: who is left, and exchanges among those alone.

Ranks may leave before buffers are made, which takes all ranks of a group of Ferry. Those that are
left then make a smaller group, where they and their experts have other numbers; what callers give
and get has those of the whole.
"""

from __future__ import annotations

import struct
from typing import NoReturn

import torch
from torch import Tensor

import ferry
from deep_ep.errors import require

_ROUTE_SLOTS = 64  # the most of Ferry
_MESSAGE_BYTES = 4096
_HEAD = struct.Struct("=qq")  # what the message is about, its bytes
_VIEW, _PART = 1, 2


class Survivors:
    """Made collectively by all ranks. A small exchange with masks, through which those that are
    left tell each other things: who does not come is masked."""

    def __init__(self, group: ferry.Group) -> None:
        self.rank, self.size = group.rank, group.size
        slots = min(self.size, _ROUTE_SLOTS)
        tokens = -(-self.size // slots)
        routes = torch.full((tokens * slots,), -1, device="cpu")
        routes[: self.size] = torch.arange(self.size, device="cpu")
        self._to_everyone = routes.view(tokens, slots)
        self.exchange = ferry.LatencyExchange(
            group,
            capacity=tokens,
            hidden=_MESSAGE_BYTES // 4,
            topk=slots,
            dtype="f32",
            masks=True,
        )

    def agree(self) -> tuple[int, ...]:
        """Collective: the ranks that are left, the same on all of them. Whom one has masked, all
        mask."""
        while True:
            before = self.exchange.masked()
            views = {rank: list(view) for rank, view in self._tell(_VIEW, bytes(before)).items()}
            for rank in range(self.size):
                if rank not in views or any(view[rank] for view in views.values()):
                    self._leave_out(rank)
            gone = [rank not in views for rank in range(self.size)]
            if all(view == gone for view in views.values()):
                return tuple(sorted(views))

    def all_gather(self, mine: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        """Collective among these ranks: the bytes of each."""
        room = _MESSAGE_BYTES - _HEAD.size - 8
        said = dict.fromkeys(ranks, b"")
        done, most = 0, 1
        while done < most:
            part = len(mine).to_bytes(8, "little") + mine[done : done + room]
            told = self._tell(_PART, part)
            if missing := [rank for rank in ranks if rank not in told]:
                raise ferry.PeerFailedError(
                    f"deep_ep: rank {self.rank}: ranks {missing} left while buffers were made; "
                    "expected all that began; call again with those that are left, or regroup",
                    rank=self.rank,
                    peer=missing[0],
                    stage="buffers of those that are left",
                )
            for rank in ranks:
                said[rank] += told[rank][8:]
            most = max(int.from_bytes(told[rank][:8], "little") for rank in ranks)
            done += room
        return [said[rank] for rank in ranks]

    def _leave_out(self, rank: int) -> None:
        if rank != self.rank and not self.exchange.masked()[rank]:
            self.exchange.set_mask(rank, True)

    def _tell(self, what: int, message: bytes) -> dict[int, bytes]:
        """Collective: the messages of those that came."""
        row = bytearray(_MESSAGE_BYTES)
        _HEAD.pack_into(row, 0, what, len(message))
        row[_HEAD.size : _HEAD.size + len(message)] = message
        tokens = torch.frombuffer(row, dtype=torch.float32).expand(len(self._to_everyone), -1)
        received = self.exchange.dispatch(tokens.contiguous(), self._to_everyone)
        counts = (received.ranges[0] & 0xFFFFFFFF).tolist()
        rows = received.x[0].view(torch.uint8)
        told, at = {}, 0
        for rank, count in enumerate(counts):
            if count == 0:
                continue
            data = rows[at].numpy().tobytes()
            at += count
            kind, size = _HEAD.unpack_from(data)
            if kind != what or not 0 <= size <= _MESSAGE_BYTES - _HEAD.size:
                self._refuse_mixed(rank)
            told[rank] = data[_HEAD.size :][:size]
        return told

    def _refuse_mixed(self, peer: int) -> NoReturn:
        raise RuntimeError(
            f"deep_ep: rank {self.rank}: rank {peer} came with another call; expected the same "
            "calls on all ranks that are left, which a rank that leaves in the middle may end"
        )


class Members:
    """The ranks of a group that are left of R ranks, which hold E experts. refuses: routes to those
    that are gone, in CPU memory; else what these would add is 0."""

    def __init__(
        self, ranks: tuple[int, ...], size: int, experts: int, refuses: bool = False
    ) -> None:
        self.ranks = ranks
        self._refuses = refuses
        self.size = size
        small, more = divmod(experts, size)
        firsts = [rank * small + min(rank, more) for rank in range(size + 1)]
        kept = [one for rank in ranks for one in range(firsts[rank], firsts[rank + 1])]
        self.experts = len(kept)
        self._among_kept = torch.full((experts + 1,), -1, device="cpu")
        self._among_kept[kept] = torch.arange(len(kept), device="cpu")
        self._ranks = torch.tensor(ranks, device="cpu")

    def routes(self, topk_idx: Tensor) -> Tensor:
        """The same routes by the experts' numbers in the group; -1 for those that are gone."""
        among_kept = self._among_kept.to(topk_idx.device)
        last = among_kept.numel() - 1  # as -1 does, it names nobody
        routes = among_kept[topk_idx.to(torch.int64).clamp(-1, last)].to(topk_idx.dtype)
        if self._refuses and not routes.is_cuda:
            lost = topk_idx[(routes < 0) & (topk_idx >= 0)].tolist()
            got = f"expert {lost[0]}, of a rank that is lost" if lost else ""
            expected = f"experts of ranks {list(self.ranks)}, or -1"
            require(not lost, "low_latency_dispatch", "topk_idx", got, expected)
        return routes

    def spread(self, columns: Tensor) -> Tensor:
        """[.., members] as [.., R]: 0 for ranks that are gone."""
        whole = columns.new_zeros(*columns.shape[:-1], self.size)
        whole[..., self._ranks.to(columns.device)] = columns
        return whole


def moved(rows: Tensor, ranges: Tensor, there: Tensor, places: int) -> Tensor:
    """Rows [L, N, H] that lie as `ranges` i64 [L, R] says, as they lie in `there`, [L, places, H],
    which a later dispatch of the same routes made, when some ranks were gone or had been taken
    back. The latter have no rows here: what answers theirs is 0."""
    ends = (there & 0xFFFFFFFF).cumsum(1)
    shift = (ranges - there) >> 32
    place = torch.arange(places, device=rows.device).repeat(rows.shape[0], 1)
    source = torch.searchsorted(ends, place, right=True).clamp(max=ends.shape[1] - 1)
    place = (place + shift.gather(1, source)).clamp(0, rows.shape[1] - 1)
    result = rows.gather(1, place[:, :, None].expand(-1, -1, rows.shape[2]))
    none_here = ((ranges & 0xFFFFFFFF) == 0).gather(1, source)
    return result.masked_fill_(none_here[:, :, None], 0)
