"""The mean of gradients over ranks, exact or compressed; in torch's DDP by a communication hook."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor

import ferry
from ferry.arguments import choice, instance, optional, refuse
from ferry.collectives import Collectives
from ferry.torch_bootstrap import from_process_group

# What crosses between domains; the sums are in fp32 in any case.
FORMATS = {name: name for name in ("exact", "bf16", "f16", "e4m3", "e5m2")} | {"auto": "automatic"}
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
ALGORITHMS = {name: name for name in ("automatic", "direct", "hierarchical", "ring", "tree")}


def collectives_of(process_group: Any, memory_bytes: int) -> Collectives:
    """Collective. Of the ranks of a process group of torch; None: the default one, or where there
    is none, the ranks of the environment."""
    import torch.distributed as dist

    initialised = dist.is_available() and dist.is_initialized()
    if process_group is None and not initialised:
        return Collectives(ferry.from_environment(), memory_bytes=memory_bytes)
    return Collectives(from_process_group(process_group), memory_bytes=memory_bytes)


def check_way(call: str, format: str, algorithm: str) -> tuple[str, str]:
    """The two in the words of `Collectives`; refuses a pair that it would refuse in each call."""
    chosen = choice(f"{call}: format", format, FORMATS)
    way = choice(f"{call}: algorithm", algorithm, ALGORITHMS)
    if way in ("ring", "tree") and chosen not in ("exact", "automatic"):
        refuse(
            f"{call}: format",
            f'"{chosen}" with algorithm "{way}", which would round at every hop',
            '"exact" or "auto", or another algorithm',
        )
    return chosen, way


class MeanOfRanks:
    """Replaces tensors by their means over the ranks, one after the other, beside the caller."""

    def __init__(self, collectives: Collectives, way: tuple[str, str]) -> None:
        format, algorithm = way
        self._options: dict[str, Any] = {"algorithm": algorithm}
        self._format = {"format": format}
        self.collectives = collectives
        self._stream = ferry.Stream()

    def start(self, x: Tensor) -> ferry.Event:
        """Collective. Holds x until the event is complete."""
        options = self._options | (self._format if x.dtype == torch.float32 else {})
        return self.collectives.all_reduce(x, op="mean", stream=self._stream, **options)

    def start_used(self, marks: Tensor) -> ferry.Event:
        """Collective. Replaces marks by 1 where any rank has one."""
        return self.collectives.all_reduce(marks, op="max", stream=self._stream)


class Gradients:
    """The state of `gradient_hook`. Collective: all ranks make it, in the same order::

        ddp.register_comm_hook(ferry.torch.Gradients(), ferry.torch.gradient_hook)

    Args:
        format: of gradients in f32 where they cross between domains: "exact"; "bf16", "f16", or
            "e4m3" and "e5m2" with a scale for each 128; "auto": chosen in each call by the time
            that it saves. Inside a domain, and in other dtypes, gradients are not compressed.
        algorithm: "direct", "hierarchical", "ring" or "tree", as of `Collectives.all_reduce`;
            "automatic": whichever is expected to take the least time. By ring and tree gradients
            are exact.
        collectives: that carry them. None: made here, of the ranks of `process_group`.
        process_group: that of the DDP; None: the default one.
    """

    def __init__(
        self,
        format: str = "auto",
        *,
        algorithm: str = "automatic",
        collectives: Collectives | None = None,
        process_group: Any = None,
    ) -> None:
        way = check_way("Gradients", format, algorithm)
        optional("Gradients: collectives", collectives, Collectives, "a ferry.Collectives")
        if collectives is None:
            collectives = collectives_of(process_group, 0)
        self.collectives = collectives
        self._mean = MeanOfRanks(collectives, way)
        self._under_way: list[tuple[ferry.Event, torch.futures.Future[Tensor], Tensor]] = []

    def start(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Collective. torch counts the buckets of a backward from 0, in the order of these calls;
        it waits for all of them at its end, and so does the call with the last one."""
        x: Tensor = bucket.buffer()
        if x.device.type != "cpu":
            refuse("gradient_hook: bucket", f"gradients on {x.device}", "gradients in CPU memory")
        if x.dtype not in DTYPES:
            got = f"gradients of dtype {x.dtype}"
            refuse("gradient_hook: bucket", got, f"dtype {', '.join(DTYPES.values())}")
        if bucket.index() == 0:  # what is left is of a backward that failed
            self._under_way.clear()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._under_way.append((self._mean.start(x), future, x))
        if bucket.is_last():
            started, self._under_way = self._under_way, []
            for event, done, reduced in started:
                event.wait()
                done.set_result(reduced)
        return future


def gradient_hook(state: Gradients, bucket: Any) -> torch.futures.Future[Tensor]:
    """For `DistributedDataParallel.register_comm_hook` of torch: gradients become their means over
    the ranks of `state`, reduced in fp32 and rounded once, with the same bits on every rank. All
    buckets but the last one are reduced beside the backward."""
    instance("gradient_hook: state", state, Gradients, "a ferry.torch.Gradients")
    return state.start(bucket)


if torch.distributed.is_available():  # torch wants these very objects, not their names
    gradient_hook.__annotations__ |= {
        "bucket": torch.distributed.GradBucket,  # type: ignore[attr-defined]
        "return": torch.futures.Future[Tensor],
    }
