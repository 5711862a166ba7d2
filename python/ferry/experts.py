"""Which ranks hold which experts, when that may change: after a loss, or with the load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferry import _ferry
from ferry.arguments import INT32_MAX, integer
from ferry.tensors import array, view


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
        self._raw.balance(
            [integer("balance: ranks", rank, 0, self.ranks - 1) for rank in ranks],
            [] if load is None else [float(each) for each in load],
            integer("balance: copies", copies, 1, INT32_MAX),
        )

    def held_by(self, rank: int) -> list[int]:
        """The experts that the rank holds, [slots]; -1: none."""
        return self._raw.held_by(integer("held_by: rank", rank, 0, self.ranks - 1))

    def places(self, topk_idx: Any, rank: int) -> Any:
        """What `Group.plan` takes for routes to experts: topk_idx, i64 or i32 [T, K], with the
        place of a copy for each expert, i64 [T, K]. rank: the one whose tokens these are; they
        spread over the copies of an expert."""
        raw, like = view("places: topk_idx", topk_idx, expected="i64 or i32")
        return array(self._raw.places(raw, integer("places: rank", rank, 0, self.ranks - 1)), like)

    def __repr__(self) -> str:
        return (
            f"ferry.ExpertPlacement({self.experts} experts, {self.ranks} ranks, {self.slots} slots)"
        )
