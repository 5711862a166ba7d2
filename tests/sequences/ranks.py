"""What one rank does: makes the calls of a sequence and compares all that they bring, then and
after every later step, for a live result is never overwritten."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import ferry
from sequences.arithmetic import Array
from sequences.compare import WrongError, compare, overwrite
from sequences.model import Call

Failure = dict[str, Any]
"""rank, step, do; kind: "wrong", "overwritten", "error", "not refused", "hang", "crash"; what: the
tensor or the class of the error; text."""

CONSEQUENCES = (
    "PeerLeftError",
    "PeerFailedError",
    "BrokenBarrierError",
    "WaitInterruptedError",
    "AbortedError",
)


class Meeting(Protocol):
    """How ranks meet outside Ferry."""

    def sync(self) -> None: ...

    def abort(self) -> None: ...


@dataclass
class Held:
    """A result that is alive."""

    result: Any
    call: Call  # shapes and parts: what it must hold, once it is there
    waits: bool = False  # on a stream, not waited for
    inputs: list[Any] = field(default_factory=list)
    reads: str = ""  # the result whose x it was given


class Rank:
    def __init__(self, group: ferry.Group, meeting: Meeting) -> None:
        self.group, self.meeting = group, meeting
        self.held: dict[str, Held] = {}
        self.plans: dict[str, Any] = {}
        self.exchanges: dict[str, Any] = {}
        self.stream: Any = None

    def run(self, calls: list[Call | None]) -> Failure | None:
        """`calls`: of this rank, one for each step. The first failure, or None."""
        done, call = 0, None
        try:
            for call in calls:
                if call is not None:
                    self.make(call)
                self.look_again()
                done += 1
            self.leave()
        except WrongError as wrong:
            found = {"kind": wrong.kind, "what": wrong.what, "text": str(wrong)}
        except Exception as error:
            kind = type(error).__name__
            found = {"kind": "error", "what": kind, "text": f"{kind}: {error}"}
        else:
            return None
        self.meeting.abort()
        return found | {"rank": self.group.rank, "step": done, "do": call.do if call else "look"}

    def leave(self) -> None:
        for name in list(self.held):
            self.settle(name)
        self.held.clear()

    def look_again(self) -> None:
        for held in self.held.values():
            if not held.waits:
                compare(held.result, held.call, "overwritten")

    def make(self, call: Call) -> None:
        act: Callable[[Call], Any] = getattr(self, f"do_{call.do}")
        if not call.errors:
            act(call)
            return
        try:
            act(call)
        except ferry.Error as error:
            if type(error).__name__ not in call.errors:
                raise
            return
        raise WrongError("not refused", call.errors[0], f"not refused: expected {call.errors}")

    def hold(self, call: Call, result: Any, inputs: list[Any], stream: bool = False) -> None:
        if stream and call.errors:
            result.event.wait()  # raises
        held = Held(result, Call(call.do, {}, (), call.shapes, call.parts), stream, inputs)
        if not stream:
            self.settled(held)
        if not call.errors:
            self.held[call.name] = held

    def settle(self, name: str) -> None:
        held = self.held[name]
        if held.waits:
            held.result.event.wait()
            self.settled(held)

    def settled(self, held: Held) -> None:
        held.waits = False
        for array in held.inputs:
            overwrite(array)
        held.inputs = []
        compare(held.result, held.call)

    def stream_of(self, given: dict[str, Any]) -> Any:
        if not given.pop("stream"):
            return None
        if self.stream is None:
            self.stream = ferry.Stream()
        return self.stream

    def refused_first(self, act: Callable[[], Any]) -> None:
        """A call that this rank alone gets wrong is refused before anything moves."""
        try:
            act()
        except ferry.InvalidArgumentError:
            return
        raise WrongError(
            "not refused", "InvalidArgumentError", "not refused: more rows than there are"
        )

    # Throughput mode

    def do_plan(self, call: Call) -> None:
        ids = call.given["topk_idx"].copy()
        self.plans[call.name] = self.group.plan(ids)
        overwrite(ids)
        compare(self.plans[call.name], call)

    def do_dispatch(self, call: Call) -> None:
        given = copied(call.given)
        stream, bad = self.stream_of(given), given.pop("bad")
        plan = given.pop("plan", None)
        if plan is not None:
            given["plan"] = self.plans[plan]
        x = given.pop("x")
        if bad:
            more = np.zeros((len(x) + 1, x.shape[1]), x.dtype)
            self.refused_first(lambda: self.group.dispatch(more, **given))
        result = self.group.dispatch(x, **given, stream=stream)
        inputs = [x, *(given.get(k) for k in ("topk_idx", "topk_weights", "scales"))]
        self.hold(call, result, inputs, stream is not None)
        if "topk_idx" in given:
            self.plans[call.name + ".plan"] = result.plan

    def do_combine(self, call: Call) -> None:
        given = copied(call.given)
        stream, bad, source = self.stream_of(given), given.pop("bad"), given.pop("source")
        given["plan"] = self.plans[given["plan"]]
        rows = given.pop("rows", None)
        inputs = [rows, *(given.get(k) for k in ("topk_weights", "bias0", "bias1"))]
        if source == "registered":
            rows = self.registered(rows)
            inputs.append(rows)
        elif source != "fresh":
            rows = self.held[source].result.x
        if bad:
            more = np.zeros((len(rows) + 1000, rows.shape[1]), rows.dtype)
            self.refused_first(lambda: self.group.combine(more, **given))
        result = self.group.combine(rows, **given, stream=stream)
        self.hold(call, result, inputs, stream is not None)
        if call.name in self.held:
            self.held[call.name].reads = source

    def registered(self, rows: Array) -> Array:
        try:
            raw = self.group.empty(rows.shape, rows.dtype, like="numpy")
        except ferry.ExhaustedError:
            return rows
        memory = np.asarray(raw).view(rows.dtype)
        memory[...] = rows
        return memory

    def do_barrier(self, call: Call) -> None:
        self.group.barrier()

    # Latency mode

    def do_exchange(self, call: Call) -> None:
        self.exchanges[call.name] = ferry.LatencyExchange(self.group, **call.given)

    def do_ldispatch(self, call: Call) -> None:
        given = copied(call.given)
        exchange = self.exchanges[given.pop("on")]
        bad, masked = given.pop("bad"), given.pop("masked", None)
        x = given.pop("x")
        if bad:
            more = np.zeros((bad, x.shape[1]), x.dtype)
            self.refused_first(lambda: exchange.dispatch(more, **given))
        result = exchange.dispatch(x, **given)
        for array in (x, given["topk_idx"], given.get("topk_weights")):
            overwrite(array)
        self.hold(call, result, [])
        if masked is not None and exchange.masked() != masked:
            text = f"masked(): {exchange.masked()}, expected {masked}"
            raise WrongError("wrong", "masked", text)

    def do_lcombine(self, call: Call) -> None:
        given = copied(call.given)
        exchange, received = self.exchanges[given.pop("on")], self.held[given.pop("of")].result
        own, bad = given.pop("rows"), given.pop("bad")
        rows = received.x if own is None else own
        if bad:
            more = np.zeros((*rows.shape[:1], rows.shape[1] + 1, *rows.shape[2:]), rows.dtype)
            self.refused_first(lambda: exchange.combine(more, received, **given))
        result = exchange.combine(rows, received, **given)
        for array in (own, given.get("topk_weights")):
            overwrite(array)
        self.hold(call, result, [])

    def do_receive(self, call: Call) -> None:
        held = self.held[call.given["of"]]
        held.result.receive()
        held.call = call
        compare(held.result, call)

    def do_meet(self, call: Call) -> None:
        self.meeting.sync()
        self.meeting.sync()

    def do_split(self, call: Call) -> None:
        self.meeting.sync()
        for peer in call.given["masked"]:
            self.exchanges[call.given["on"]].set_mask(peer)
        self.meeting.sync()

    def do_clear(self, call: Call) -> None:
        self.meeting.sync()
        self.exchanges[call.given["on"]].clear_masks()
        self.meeting.sync()

    def do_rejoin(self, call: Call) -> None:
        self.exchanges[call.given["on"]].rejoin()

    def do_leave(self, call: Call) -> None:
        self.meeting.sync()
        if call.given["rank"] == self.group.rank:
            self.leaves()
        self.meeting.sync()

    def leaves(self) -> None:
        for name in self.held:
            self.settle(name)
        self.group.destroy()

    def do_drop(self, call: Call) -> None:
        name = call.given["of"]
        self.settle(name)
        for reader, other in self.held.items():
            if other.reads == name:  # a call on a stream reads what it was given until its event
                self.settle(reader)
        held = self.held.pop(name)
        if held.call.parts and held.call.do in ("dispatch", "ldispatch", "receive"):
            overwrite(held.result.x)


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in given.items()}


def run_rank(
    bootstrap: Any, config: dict[str, Any], calls: list[Call | None], meeting: Meeting
) -> Failure | None:
    """A sequence on one rank, from the making of its group to the end."""
    try:
        with ferry.Group(bootstrap, **config) as group:
            # After a leave the rest of the sequence is but looks at what the rank still holds.
            found = Rank(group, meeting).run(calls)
            if found is None:
                meeting.sync()  # who leaves first would be missed by those that are still at it
            return found
    except Exception as error:
        meeting.abort()
        kind = type(error).__name__
        text = f"{kind}: {error}"
        return {"kind": "error", "what": kind, "text": text, "rank": -1, "step": -1, "do": "group"}


class ThreadMeeting:
    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)

    def sync(self) -> None:
        self.barrier.wait()

    def abort(self) -> None:
        self.barrier.abort()


def first_cause(failures: list[Failure | None]) -> Failure | None:
    """A rank that fails leaves; what the others say about that is not the cause."""
    found = [failure for failure in failures if failure is not None]
    found.sort(key=lambda one: (one["what"] in CONSEQUENCES, one["step"]))
    return found[0] if found else None
