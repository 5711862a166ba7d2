"""The groups of Ferry that one Buffer uses.

A group of Ferry knows its number of experts; a Buffer learns it with each call. So there is a group
for each number of experts and each kind of device, made when first needed. Only the constructor
talks through the caller's communicator, which may serve other ends afterwards, or be gone: ranks
find each other for later groups through a small group of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch

import ferry
from deep_ep.environment import deadline
from deep_ep.sizes import round_up

_LATER_BYTES = 64 << 20
"""Registered for tensors at first, of groups in CPU memory and of all but a Buffer's first: it
grows by agreement."""
_LEAST_BYTES = 1 << 20
_MOST_MESSAGE_BYTES = 1 << 30
_WINDOW_STEP = 4096  # bytes, more than registered memory is cut by


class Groups:
    """Made collectively.

    bootstrap: how the ranks find each other, used here and not after. memory_bytes: what the first
    group on GPUs registers for tensors; the most that any rank says. seconds: that any wait may
    take, unless FERRY_DEADLINE says it. crossing: of exchanges between domains, as of a Group.
    """

    def __init__(
        self,
        bootstrap: ferry.Bootstrap,
        memory_bytes: int,
        seconds: float | None = None,
        crossing: str = "automatic",
    ) -> None:
        self._crossing = crossing
        self._deadline = deadline() if seconds is None else deadline(seconds)
        self._base = ferry.Group(
            bootstrap,
            experts=bootstrap.size,
            deadline=self._deadline,
            memory_bytes=_LEAST_BYTES,
            backend="host",
        )
        # A token for each rank. Where torch makes tensors by itself is for the caller to say, so
        # every tensor here names its own place.
        self._left = list(range(bootstrap.size))
        self._to_everyone = self._plan_to_everyone()
        said = self.all_gather(struct.pack("=q", memory_bytes))
        self._memory_bytes = max(struct.unpack("=q", one)[0] for one in said)
        self._collectives: dict[torch.device, ferry.Collectives] = {}
        self._of_all: dict[tuple[int, torch.device], ferry.Group] = {}
        self._made: dict[tuple[int, torch.device, tuple[int, ...]], ferry.Group] = {}

    @property
    def everyone(self) -> ferry.Group:
        """All ranks, in CPU memory, with an expert on each."""
        return self._base

    def of(self, num_experts: int, device: torch.device) -> ferry.Group:
        """The group with that many experts whose tensors lie there; collective when it is new."""
        found = self._of_all.get((num_experts, device))
        if found is None:
            everyone = tuple(range(self._base.size))
            self._require_all("a new number of experts, or tensors elsewhere")
            found = self.among(everyone, num_experts, device, self.all_gather)
            self._of_all[num_experts, device] = found
            if self._base.domains == 1:
                # Should a rank die now, `regroup` knows how many groups all have.
                self._base.commit(len(self._of_all))
        return found

    def regroup(self) -> list[int]:
        """Collective among the ranks that are left: all groups go on without the others. Returns
        who is left. Calls other than of groups that are there take all ranks, and are refused."""
        if any(device.type != "cpu" for _, device in self._of_all) or self._base.domains > 1:
            raise ferry.UnsupportedError(
                f"regroup: rank {self._base.rank}: got a Buffer on GPUs or of several domains; "
                "expected tensors in CPU memory, on one host; make a new Buffer of those left"
            )
        view = self._base.regroup()
        while True:
            # One that a rank died in the making of, some have and others do not.
            for key in list(self._of_all)[view.step :]:
                del self._made[(*key, tuple(range(self._base.size)))]
                self._of_all.pop(key).destroy()
            views = [group.regroup() for group in self._of_all.values()]
            if all(one.ranks == view.ranks for one in views):
                break
            view = self._base.regroup()  # all do: a view is the same on all ranks
        self._left = view.ranks
        self._to_everyone = self._plan_to_everyone()
        return view.ranks

    def _plan_to_everyone(self) -> ferry.Plan:
        return self._base.plan(torch.tensor(self._left, device="cpu").reshape(-1, 1))

    def _require_all(self, what: str) -> None:
        if lost := sorted(set(range(self._base.size)) - set(self._left)):
            raise ferry.UnsupportedError(
                f"deep_ep: rank {self._base.rank}: ranks {lost} are lost; got a call that needs "
                f"{what}, which takes all ranks; expected calls as before regroup, or a new Buffer"
            )

    def among(
        self,
        ranks: tuple[int, ...],
        num_experts: int,
        device: torch.device,
        gather: Callable[[bytes], list[bytes]],
    ) -> ferry.Group:
        """The same of some of the ranks, which reach each other by `gather`."""
        key = (num_experts, device, ranks)
        found = self._made.get(key)
        if found is None:
            bootstrap = ferry.from_all_gather(ranks.index(self._base.rank), len(ranks), gather)
            found = self._made[key] = self._make(bootstrap, num_experts, device)
        return found

    def collectives(self, device: torch.device, memory_bytes: int = 0) -> ferry.Collectives:
        """Calls on dense tensors that lie there, with so much registered memory at least where they
        are new; collective then."""
        self._require_all("calls on dense tensors")
        found = self._collectives.get(device)
        if found is None:
            on_gpu = device.type == "cuda"
            found = self._collectives[device] = ferry.Collectives(
                ferry.from_all_gather(self._base.rank, self._base.size, self.all_gather),
                deadline=self._deadline,
                memory_bytes=max(_LEAST_BYTES, memory_bytes),
                backend="cuda" if on_gpu else "host",
                device=device if on_gpu else None,
            )
        return found

    def windows(
        self, parts: Sequence[tuple[int, int]]
    ) -> tuple[ferry.Collectives, list[ferry.Window]]:
        """Collective: rows of bytes of this rank, in CPU memory, which the others read by
        themselves. parts: rows and the bytes of one, the same on all ranks. What is returned first
        is theirs alone, and keeps them."""
        self._require_all("rows that ranks read by themselves")
        room = sum(
            round_up(rows * row_bytes, _WINDOW_STEP) + _WINDOW_STEP for rows, row_bytes in parts
        )
        ranks = ferry.Collectives(
            ferry.from_all_gather(self._base.rank, self._base.size, self.all_gather),
            deadline=self._deadline,
            memory_bytes=max(_LEAST_BYTES, room),
            backend="host",
        )
        made = [ranks.window(rows, row_bytes, torch.uint8) for rows, row_bytes in parts]
        return ranks, made

    def memory_bytes(self) -> int:
        """That all groups hold on this rank."""
        made: list[ferry.Group | ferry.Collectives] = [self._base, *self._made.values()]
        held = (one.memory() for one in (*made, *self._collectives.values()))
        return sum(one.control_bytes + one.arena_bytes + one.latency_bytes for one in held)

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Collective: the bytes of all ranks, in rank order; of a lost one as many zeros as this
        rank says."""
        sizes = self._swap(torch.tensor([len(mine), 0], device="cpu")).tolist()
        longest = max(size for size, _ in sizes)
        if min(size for size, _ in sizes) < 0 or longest > _MOST_MESSAGE_BYTES:
            raise RuntimeError(f"all_gather: ranks announce {sizes} bytes; expected 0 to 2^30")
        size = max(16, -(-longest // 16) * 16)
        row = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if mine:
            row[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self._swap(row)
        said = [bytes(len(mine))] * self._base.size
        for rank, row, (size, _) in zip(self._left, rows, sizes):
            said[rank] = row[:size].numpy().tobytes()
        return said

    def destroy(self) -> None:
        """Leave all groups; waits for no peer."""
        made: list[ferry.Group | ferry.Collectives] = [*self._made.values()]
        for one in (*made, *self._collectives.values()):
            one.destroy()
        self._base.destroy()

    def _make(
        self, bootstrap: ferry.Bootstrap, num_experts: int, device: torch.device
    ) -> ferry.Group:
        on_gpu = device.type == "cuda"
        memory_bytes = max(_LEAST_BYTES, self._memory_bytes)
        if self._made or not on_gpu:
            memory_bytes = min(memory_bytes, _LATER_BYTES)
        return ferry.Group(
            bootstrap,
            experts=num_experts,
            deadline=self._deadline,
            memory_bytes=memory_bytes,
            backend="cuda" if on_gpu else "host",
            device=device if on_gpu else None,
            crossing=self._crossing,
        )

    def _swap(self, row: torch.Tensor) -> torch.Tensor:
        tokens = row.expand(len(self._left), -1).contiguous()
        return self._base.dispatch(tokens, self._to_everyone).x
