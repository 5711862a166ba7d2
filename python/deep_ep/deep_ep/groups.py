"""The groups of Ferry that one Buffer uses.

A group of Ferry knows its number of experts; a Buffer learns it with each call. So there is a group
for each number of experts and each kind of device, made when first needed. Only the constructor
talks through the caller's communicator, which may serve other ends afterwards, or be gone: ranks
find each other for later groups through a small group of their own.

Ranks may be lost, and processes may take their places (`regroup`). Processes join the small group
alone; the others are made anew when somebody has come who has none of them.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import ferry
from deep_ep.elastic_group import ElasticGroup
from deep_ep.environment import deadline
from deep_ep.sizes import round_up

LOSSES = (ferry.PeerFailedError, ferry.PeerLeftError, ferry.DeadlineExceededError)
"""What a call raises when a rank has died, has left, or does not come."""

_LATER_BYTES = 64 << 20
"""Registered for tensors at first, of groups in CPU memory and of all but a Buffer's first: it
grows by agreement."""
_LEAST_BYTES = 1 << 20
_WINDOW_STEP = 4096  # bytes, more than registered memory is cut by
_STATE = struct.Struct("=qq")  # of a rank: memory_bytes, groups of all ranks
_PAUSE = 0.001  # seconds, before it polls again whether somebody joins


class Groups:
    """Made collectively.

    meeting: how the ranks find each other, used here and not after. memory_bytes: what the first
    group on GPUs registers for tensors; the most that any rank says. seconds: that any wait may
    take, unless FERRY_DEADLINE says it. crossing: of exchanges between domains, as of a Group.
    """

    def __init__(
        self,
        meeting: ferry.Bootstrap | ElasticGroup,
        memory_bytes: int,
        seconds: float | None = None,
        crossing: str = "automatic",
    ) -> None:
        self._crossing = crossing
        self._deadline = deadline() if seconds is None else deadline(seconds)
        self._domains: dict[str, Any] = {}
        self._arbiter: dict[str, Any] = {}
        self._elastic = ""
        if isinstance(meeting, ElasticGroup):
            self._domains, self._arbiter = meeting.domains, meeting.arbiter
            self._elastic, meeting = meeting.name, meeting.bootstrap
        self._base = ferry.Group(
            meeting,
            experts=meeting.size,
            deadline=self._deadline,
            memory_bytes=_LEAST_BYTES,
            backend="host",
            elastic=self._elastic,
            **self._domains,
            **self._arbiter,
        )
        self._memory_bytes = memory_bytes
        self._collectives: dict[torch.device, ferry.Collectives] = {}
        self._of_all: dict[tuple[int, torch.device], ferry.Group] = {}
        self._of_some: dict[tuple[int, torch.device, tuple[int, ...]], ferry.Group] = {}
        try:
            self._settle()
        except LOSSES:
            if not meeting.joins:
                raise
            self.regroup()

    @property
    def everyone(self) -> ferry.Group:
        """All ranks, in CPU memory, with an expert on each."""
        return self._base

    @property
    def left(self) -> tuple[int, ...]:
        """The ranks that are there."""
        return tuple(self._left)

    def of(self, num_experts: int, device: torch.device) -> ferry.Group:
        """The group with that many experts whose tensors lie there; collective when it is new."""
        found = self._of_all.get((num_experts, device))
        if found is None:
            if len(self._left) == self._base.size:
                found = self._make(self._meeting, num_experts, device)
                if self._elastic and found.domains > 1:
                    found.commit(1)  # from here on a host that is silent is missed
            else:
                found = self._with_empty_places(num_experts, device)
            self._of_all[num_experts, device] = found
        return found

    def regroup(self, then: Callable[[], None] = lambda: None) -> list[int]:
        """Collective among the ranks that are left: the groups go on without the others, and with
        those that have joined. Returns who is there. Calls on dense tensors take all ranks, and
        what they have is dropped.

        then: collective, too. If a rank is lost meanwhile, all is done once more.
        """
        while True:
            self._base.regroup()
            try:
                self._settle()
                if self._regrouped():
                    then()
                    return self._left
            except LOSSES:
                continue

    def _settle(self) -> None:
        """Collective in a new epoch: which groups all have, and the most memory."""
        self._left = self._base.view().ranks
        self._meeting = ferry.from_group(self._base)
        mine = _STATE.pack(self._memory_bytes, self._going_on())
        said = [_STATE.unpack(one) for one in self._meeting.all_gather(mine)]
        self._memory_bytes = max(size for size, _ in said)
        # One that a rank died in the making of, some have and others do not; who joined has none.
        self._keep(min(count for _, count in said))
        for others in (self._of_some, self._collectives):
            for one in others.values():
                one.destroy()
            others.clear()

    def _going_on(self) -> int:
        """How many groups of all ranks, from the first one on, can go on with those that are left.
        In several domains not every death is proven, so these must be a majority of each."""
        for at, group in enumerate(self._of_all.values()):
            if group.domains > 1 and 2 * len(self._left) <= len(group.view().ranks):
                return at
        return len(self._of_all)

    def _keep(self, count: int) -> None:
        """Leave the groups of all ranks but for the first ones."""
        for key in list(self._of_all)[count:]:
            self._of_all.pop(key).destroy()

    def _regrouped(self) -> bool:
        """Collective. Whether all groups have the ranks that are left, which all ranks see alike:
        not if another one was lost meanwhile."""
        alike = True
        for at, group in enumerate(list(self._of_all.values())):
            try:
                alike = group.regroup().ranks == self._left and alike
            except ferry.DeadlineExceededError:
                self._keep(at)
                return False
        return alike

    def _require_all(self, what: str) -> None:
        if lost := sorted(set(range(self._base.size)) - set(self._left)):
            raise ferry.UnsupportedError(
                f"deep_ep: rank {self._base.rank}: ranks {lost} are lost; got a call that needs "
                f"{what}, which takes all ranks; expected other calls, or processes in their places"
            )

    def among(
        self,
        ranks: tuple[int, ...],
        num_experts: int,
        device: torch.device,
        gather: Callable[[bytes], list[bytes]] | None = None,
    ) -> ferry.Group:
        """The same of some of the ranks, renumbered, which reach each other by `gather`; None: of
        those that are left."""
        key = (num_experts, device, ranks)
        found = self._of_some.get(key)
        if found is None:
            bootstrap = self._meeting
            if gather is not None:
                rank = ranks.index(self._base.rank)
                bootstrap = ferry.from_all_gather(rank, len(ranks), gather)
            # Blocks of renumbered ranks are no domains.
            found = self._make(bootstrap, num_experts, device, domain_size=0)
            self._of_some[key] = found
        return found

    def collectives(self, device: torch.device, memory_bytes: int = 0) -> ferry.Collectives:
        """Calls on dense tensors that lie there, with so much registered memory at least where they
        are new; collective then."""
        self._require_all("calls on dense tensors")
        found = self._collectives.get(device)
        if found is None:
            found = self._collectives[device] = ferry.Collectives(
                self._meeting,
                deadline=self._deadline,
                memory_bytes=max(_LEAST_BYTES, memory_bytes),
                **_where(device),
                **self._domains,
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
            self._meeting,
            deadline=self._deadline,
            memory_bytes=max(_LEAST_BYTES, room),
            backend="host",
            **self._domains,
        )
        made = [ranks.window(rows, row_bytes, torch.uint8) for rows, row_bytes in parts]
        return ranks, made

    def memory_bytes(self) -> int:
        """That all groups hold on this rank."""
        held = (one.memory() for one in (self._base, *self._others()))
        return sum(one.control_bytes + one.arena_bytes + one.latency_bytes for one in held)

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Collective: the bytes of all ranks, in rank order; of a lost one as many zeros as this
        rank says."""
        said = [bytes(len(mine))] * self._base.size
        for rank, one in zip(self._left, self._meeting.all_gather(mine)):
            said[rank] = one
        return said

    def destroy(self) -> None:
        """Leave all groups; waits for no peer."""
        for one in self._others():
            one.destroy()
        self._base.destroy()

    def _others(self) -> list[ferry.Group | ferry.Collectives]:
        return [*self._of_all.values(), *self._of_some.values(), *self._collectives.values()]

    def _make(
        self, bootstrap: ferry.Bootstrap, num_experts: int, device: torch.device, **config: Any
    ) -> ferry.Group:
        memory_bytes = max(_LEAST_BYTES, self._memory_bytes)
        if self._of_all or self._of_some or device.type != "cuda":
            memory_bytes = min(memory_bytes, _LATER_BYTES)
        return ferry.Group(
            bootstrap,
            experts=num_experts,
            deadline=self._deadline,
            memory_bytes=memory_bytes,
            crossing=self._crossing,
            **_where(device),
            **{**self._domains, **config},
        )

    def _with_empty_places(self, num_experts: int, device: torch.device) -> ferry.Group:
        """Of all places, though ranks are lost: the lowest that is left begins it, and the others
        join. `_settle` drops it when somebody takes an empty place."""
        base, left = self._base, self._left
        config = dict(self._arbiter, elastic="deep_ep")
        if base.domains > 1:
            config.update(domain_size=self._block_of_a_domain(), network="ofi")
        key = self._meeting.all_gather(os.urandom(16))[0]
        begins = base.rank == left[0]
        address = next((nic.address for nic in base.nics() if nic.address), "")
        bootstrap = ferry.from_all_gather(
            base.rank, base.size, _nobody, address, job_key=key, begin=begins, join=not begins
        )
        group = self._make(bootstrap, num_experts, device, **config)
        with ThreadPoolExecutor(1) as beside:
            # Who has not joined yet is watched by the small group alone.
            all_are_in = beside.submit(base.barrier)
            # A death, or a regroup of others, ends what this rank waits for in the new group.
            all_are_in.add_done_callback(lambda done: group.destroy() if done.exception() else None)
            try:
                known, end = {left[0]}, time.monotonic() + self._deadline
                while (ranks := group.view().ranks) != left:
                    if all_are_in.done():
                        all_are_in.result()  # raises where a rank died
                        # From here on the small group sees no death.
                        self._require_there(known.difference(ranks))
                        if time.monotonic() > end:
                            self._require_there(set(left).difference(ranks))
                    known.update(ranks)
                    if _one_waits(group):
                        group.regroup()
                    else:
                        time.sleep(_PAUSE)
                all_are_in.result()
            except BaseException as error:
                group.destroy()  # who waits to join it learns that
                if isinstance(error, ferry.DestroyedError):
                    all_are_in.result()
                raise
        return group

    def _require_there(self, lost: set[int]) -> None:
        if lost:
            raise ferry.PeerFailedError(
                f"deep_ep: rank {self._base.rank}: rank {min(lost)} died while a group was made "
                "in which ranks are missing; expected that all call regroup",
                rank=self._base.rank,
                peer=min(lost),
                stage="group with empty places",
            )

    def _block_of_a_domain(self) -> int:
        """The ranks of each domain; 1, by which all reach each other, where these are no blocks."""
        domains = [self._base.domain_of(rank) for rank in range(self._base.size)]
        ranks = domains.count(domains[0])
        alike = all(domain == rank // ranks for rank, domain in enumerate(domains))
        return ranks if alike else 1


def _one_waits(group: ferry.Group) -> bool:
    try:
        return group.commit(group.view().step + 1)
    except ferry.PeerFailedError:  # also of a rank that has seen it first, and called regroup
        return True


def _where(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {"backend": "cuda" if on_gpu else "host", "device": device if on_gpu else None}


def _nobody(mine: bytes) -> list[bytes]:
    raise AssertionError("a process that joins gathers with nobody")
