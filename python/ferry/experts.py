"""Which ranks hold which experts, when that may change: after a loss, or with the load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferry import _ferry
from ferry.arguments import INT32_MAX, describe, flag, integer, number, refuse, tensor_words
from ferry.tensors import NUMPY, array, on_gpu, storage_of, view


def _elements(name: str, values: Any, expected: str) -> Sequence[Any]:
    """Of a list, a tuple, an array or a tensor."""
    if tensor_words(values) is not None:
        storage_of(name, values)
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        refuse(name, describe(values), expected)
    return found


class ExpertPlacement:
    """Logical experts in places. Each rank has `slots` places, each of which is empty or holds a
    copy of one expert. A group that is made with experts=ranks * slots carries rows to places: slot
    s of rank r is what it calls expert r * slots + s. Computed without any exchange: ranks that
    make the same calls have the same placement.

    It begins balanced for equal loads, with one copy of each expert.
    """

    def __init__(self, *, experts: int, ranks: int, slots: int) -> None:
        self._raw = _ferry.ExpertPlacement(
            integer("ExpertPlacement: experts", experts, 1, INT32_MAX),
            integer("ExpertPlacement: ranks", ranks, 1, INT32_MAX),
            integer("ExpertPlacement: slots", slots, 1, INT32_MAX),
        )
        self._on_gpu: tuple[Any, list[Any]] | None = None  # table of copies, and of what it is

    @property
    def experts(self) -> int:
        """Logical experts."""
        return self._raw.experts

    @property
    def ranks(self) -> int:
        """Ranks of the group, lost ones too."""
        return self._raw.ranks

    @property
    def slots(self) -> int:
        """Places of each rank."""
        return self._raw.slots

    def balance(
        self, ranks: Sequence[int], load: Sequence[float] | None = None, copies: int = 1
    ) -> None:
        """Places the experts on these ranks of the group alone (`GroupView.ranks`), at least
        `copies` times each if the slots suffice; slots that are left go to further copies of the
        heaviest. What need not move stays. load: of each expert, 0 or more; None: all equal.

        Raises `InvalidArgumentError`, and changes nothing, when these ranks have fewer places than
        there are experts.
        """
        loads = [] if load is None else _elements("balance: load", load, "numbers, or None")
        self._raw.balance(
            [
                integer("balance: ranks", rank, 0, self.ranks - 1)
                for rank in _elements("balance: ranks", ranks, "ranks of the group")
            ],
            [number("balance: load", each) for each in loads],
            integer("balance: copies", copies, 1, INT32_MAX),
        )

    @property
    def digest(self) -> int:
        """A number that tells placements apart, for `Group.plan(..., placement_digest=)`."""
        return self._raw.digest

    def held_by(self, rank: int) -> list[int]:
        """The experts that the rank holds, [slots]; -1: none."""
        return self._raw.held_by(integer("held_by: rank", rank, 0, self.ranks - 1))

    def places(self, topk_idx: Any, rank: int, masked: Sequence[bool] | None = None) -> Any:
        """What `Group.plan` takes for routes to experts: topk_idx, i64 or i32 [T, K], with the
        place of a copy for each expert, i64 [T, K]. rank: the one whose tokens these are; they
        spread over the copies of an expert. masked: as `LatencyExchange.masked` says, [ranks];
        copies there get no tokens, and ranks may differ in it.

        Raises `InvalidArgumentError` for a route to an expert of which no other copy is left. Of
        routes on a GPU nothing is read here: then `Group.plan` refuses it.
        """
        without = []
        if masked is not None:
            given = _elements("places: masked", masked, "a bool for each rank, or None")
            without = [flag("places: masked", each) for each in given]
        who = integer("places: rank", rank, 0, self.ranks - 1)
        if on_gpu(topk_idx):
            return self._places_on_gpu(topk_idx, who, without)
        raw, like = view("places: topk_idx", topk_idx, expected="i64 or i32")
        return array(self._raw.places(raw, who, without), like)

    def _places_on_gpu(self, topk_idx: Any, rank: int, masked: list[bool]) -> Any:
        from ferry import torch_places

        if masked and len(masked) != self.ranks:
            refuse("places: masked", f"{len(masked)} ranks", f"{self.ranks}, or none")
        of = (self.digest, tuple(masked), topk_idx.device)
        if self._on_gpu is None or self._on_gpu[0] != of:
            held_by = [self.held_by(each) for each in range(self.ranks)]
            made = torch_places.copy_table(held_by, self.experts, masked)
            self._on_gpu = of, [each.to(topk_idx.device) for each in made]
        return torch_places.place_copies(topk_idx, rank, *self._on_gpu[1])

    def __repr__(self) -> str:
        return (
            f"ferry.ExpertPlacement({self.experts} experts, {self.ranks} ranks, {self.slots} slots)"
        )


def checked_sizes(
    name: str, experts: int, ranks: int, slots: int, domain_size: int, copy_rows: int, max_rows: int
) -> tuple[int, int, int, int, int, int]:
    """What a balancer of this name is made of, as integers."""
    return (
        integer(f"{name}: experts", experts, 1, INT32_MAX),
        integer(f"{name}: ranks", ranks, 1, INT32_MAX),
        integer(f"{name}: slots", slots, 1, INT32_MAX),
        integer(f"{name}: domain_size", domain_size, 0, INT32_MAX),
        integer(f"{name}: copy_rows", copy_rows, 0, INT32_MAX),
        integer(f"{name}: max_rows", max_rows, 0),
    )


class BatchBalancer:
    """Copies of busy experts, planned anew for each batch, so that all ranks work on as many rows.

    Expert e lives on rank e // (experts // ranks) and never moves; besides, each rank has `slots`
    slots for copies of others'. Computed without any exchange, in integers: ranks that make the
    same calls have the same plan. For each batch, on all ranks:

    1. `counts` of the own routes; an all-gather brings those of all ranks.
    2. `invalidate` each rank whose experts have changed since they were copied.
    3. `plan` says which copies are needed; the weights of `fetches` go to the slots; `fetched`.
    4. `places` of the routes go to `Group.plan`, or to a latency exchange. The group is made with
       `experts=group_experts`: the block of a rank begins with its own experts, its slots follow.

    Weights may come while tokens go out: `fetching` once they are on their way, and `fetched`
    before anything is computed with a copy.

    topk_idx and counts may be torch tensors on a GPU; `counts` and `places` return such then, and
    only `plan` waits for the GPU, as it reads the counts. There `places` does not compare the
    routes with the counts, and an id that is no expert is found by `Group.plan`.

    Gradients that slots hold belong to the experts of `table`. `ferry.torch.ExpertParallel` does
    all of it with `balance=slots`.

    Args:
        experts: a multiple of ranks.
        domain_size: as of `Group`: copies stay inside domains of so many ranks where they can.
        copy_rows: rows of work that moving the weights and the gradient of a copy costs. Copies are
            made where they save more.
        max_rows: > 0: copies are made, too, where a rank would have more rows; the search goes on
            to that number then, or to the mean, where 1.02 of it is more. `load` says what was
            found.
    """

    def __init__(
        self,
        *,
        experts: int,
        ranks: int,
        slots: int,
        domain_size: int = 0,
        copy_rows: int = 0,
        max_rows: int = 0,
    ) -> None:
        sizes = (experts, ranks, slots, domain_size, copy_rows, max_rows)
        self._raw = _ferry.BatchBalancer(*checked_sizes("BatchBalancer", *sizes))

    @property
    def experts(self) -> int:
        """Logical experts."""
        return self._raw.experts

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return self._raw.ranks

    @property
    def slots(self) -> int:
        """Slots for copies on each rank."""
        return self._raw.slots

    @property
    def group_experts(self) -> int:
        """Experts of the group: the logical ones and all slots."""
        return self._raw.group_experts

    @property
    def table(self) -> list[list[int]]:
        """[ranks][slots], as `ferry.torch.reduce_experts` takes it: the expert whose tokens go to
        each slot in this batch; -1: no tokens do."""
        return self._rows(self._raw.table)

    @property
    def fetches(self) -> list[list[int]]:
        """The same, as `ferry.torch.copy_experts` takes it, where the slot does not hold a valid
        copy yet; else -1."""
        return self._rows(self._raw.fetches)

    @property
    def load(self) -> list[int]:
        """[ranks]: slots of routes that each rank works on in this batch."""
        return self._raw.load

    @property
    def plan_id(self) -> int:
        """Equal where the plan is the same one; 0: nothing was planned."""
        return self._raw.plan_id

    def counts(self, topk_idx: Any) -> Any:
        """i32 [experts]: how many slots of the routes, i64 or i32 [T, K], name each expert."""
        if on_gpu(topk_idx):
            from ferry import torch_places

            return torch_places.count(topk_idx, self.experts)
        raw, like = view("counts: topk_idx", topk_idx, expected="i64 or i32")
        return array(self._raw.counts(raw), like)

    def invalidate(self, rank: int) -> None:
        """The weights of experts that live on this rank have changed: no copy of them is valid."""
        self._raw.invalidate(integer("invalidate: rank", rank, 0, self.ranks - 1))

    def plan(self, counts: Any, *, again: bool = False) -> None:
        """counts: i32 [ranks, experts], of all ranks in order. The heaviest rank has at most 1.02
        of the mean load if the planner finds a way (else the least that it finds), with few copies
        to fetch, but for `copy_rows`. From here on what the slots of `fetches` held is lost.

        Counts of one of the last 64 batches that differ get the plan that it had. again: that must
        be so, as this is a batch that activation checkpointing computes once more. Raises
        `InvalidArgumentError` where there is none."""
        if on_gpu(counts):
            counts = counts.cpu()
        self._raw.plan(view("plan: counts", counts, expected="i32")[0], flag("plan: again", again))

    def fetching(self) -> None:
        """The weights of all `fetches` are on their way: `places` may be asked for, and `fetched`
        must follow before a copy is used. Else the next plan takes their slots for empty."""
        self._raw.fetching()

    def fetched(self) -> None:
        """The weights of all `fetches` are in their slots, on all ranks."""
        self._raw.fetched()

    def places(self, topk_idx: Any, rank: int) -> Any:
        """What `Group.plan` takes for routes of `rank` to experts: i64 [T, K]. They must be those
        that were counted. Tokens go home first, then to copies in ascending rank, in ascending
        order. Raises `InvalidArgumentError` before `fetching` or `fetched`: no token goes to a copy
        that may be missing."""
        rank = integer("places: rank", rank, 0, self.ranks - 1)
        if on_gpu(topk_idx):
            import torch

            from ferry import torch_places

            return torch_places.place(topk_idx, self.experts, torch.from_numpy(self.shares(rank)))
        raw, like = view("places: topk_idx", topk_idx, expected="i64 or i32")
        return array(self._raw.places(raw, rank), like)

    def shares(self, rank: int) -> Any:
        """`places` for routes that are elsewhere: i64 [2, group_experts], places and how many of
        the slots of `rank` go to each. Its slots that name an expert, sorted by it (stably), go to
        the places in this order."""
        return array(self._raw.shares(integer("shares: rank", rank, 0, self.ranks - 1)), NUMPY)

    def _rows(self, flat: list[int]) -> list[list[int]]:
        return [flat[at : at + self.slots] for at in range(0, len(flat), self.slots)]

    def __repr__(self) -> str:
        return (
            f"ferry.BatchBalancer({self.experts} experts, {self.ranks} ranks, {self.slots} slots)"
        )
