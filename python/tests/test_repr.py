"""Every object says what it is in one short line, also when its group is gone."""

from __future__ import annotations

import os
import re
import threading

import numpy as np
import torch
from rank_threads import run_ranks

import ferry

ROUTES = np.array([[0, 1], [2, 3], [3, -1]])


def test_plans_and_results() -> None:
    def body(group: ferry.Group) -> list[str]:
        plan = group.plan(ROUTES)
        x = np.ones((3, 16), np.float16)
        weights = np.ones((3, 2), np.float32)
        received = group.dispatch(x, plan, topk_weights=weights)
        own = group.dispatch(torch.ones(3, 16), plan, out=torch.zeros(5, 16))
        combined = group.combine(received.x, plan)
        into = group.combine(own.x, plan, out=torch.zeros(3, 16))
        return [repr(thing) for thing in (plan, received, own, combined, into, received.event)]

    assert run_ranks(1, body)[0] == [
        "<ferry.Plan: 3 tokens, top-2>",
        "<ferry.Received: x f16 [3, 16], topk_weights f32 [3, 2]>",
        "<ferry.Received: x f32 [3, 16]>",
        "<ferry.Combined: x f16 [3, 16]>",
        "<ferry.Combined: x f32 [3, 16]>",
        "<ferry.Event: complete>",
    ]


def test_latency_mode() -> None:
    def body(group: ferry.Group) -> list[str]:
        latency = ferry.LatencyExchange(group, capacity=4, hidden=128, topk=2)
        x = torch.ones(3, 128, dtype=torch.bfloat16)
        sent = latency.dispatch(x, ROUTES, format="e4m3", hook=True)
        before = repr(sent)
        sent.receive()
        rows = torch.zeros(sent.x.shape, dtype=torch.bfloat16)
        back = latency.combine(rows, sent, torch.ones(3, 2))
        return [repr(latency), before, repr(sent), repr(back)]

    exchange, before, sent, back = run_ranks(1, body)[0]
    assert exchange == "<ferry.LatencyExchange: capacity 4, hidden 128, top-2, bf16>"
    assert before.startswith("<ferry.LatencyReceived: x e4m3 [8, 4, 128]")
    assert sent == "<ferry.LatencyReceived: x e4m3 [8, 4, 128], scales f32 [8, 4, 1]>"
    assert back == "<ferry.LatencyCombined: x bf16 [3, 128]>"


def test_bootstraps() -> None:
    assert [repr(b) for b in ferry.threads(2)] == [
        "<ferry.Bootstrap: rank 0 of 2>",
        "<ferry.Bootstrap: rank 1 of 2>",
    ]


def test_streams_say_how_much_is_under_way() -> None:
    bootstraps = ferry.threads(2)
    late = threading.Event()

    def second() -> None:
        with ferry.Group(bootstraps[1], experts=4, deadline=20.0) as group:
            late.wait(20)
            group.plan(ROUTES)
            group.barrier()

    thread = threading.Thread(target=second)
    thread.start()
    with ferry.Group(bootstraps[0], experts=4, deadline=20.0) as group:
        stream = ferry.Stream()
        assert repr(stream) == "<ferry.Stream: 0 calls under way>"
        plan = group.plan(ROUTES, stream=stream)
        end = stream.record()
        assert repr(stream) == "<ferry.Stream: 1 calls under way>"
        assert repr(end) == "<ferry.Event: under way>"
        assert repr(plan) == "<ferry.Plan: 3 tokens, top-2>"  # does not wait for the counts
        late.set()
        stream.synchronize()
        assert repr(stream) == "<ferry.Stream: 0 calls under way>"
        group.barrier()
    thread.join()


def test_a_repr_never_fails() -> None:
    group = ferry.Group(ferry.threads(1)[0], experts=4)
    plan = group.plan(ROUTES)
    received = group.dispatch(np.ones((3, 16), np.float32), plan)
    things = [group, plan, received, received.event, ferry.Stream(), ferry.threads(1)[0]]
    child = os.fork()
    if child == 0:  # in here nothing of Ferry can be used
        wrong = 99
        try:
            said = [repr(thing) for thing in things]
            wrong = sum(not re.fullmatch(r"<ferry\.\w+, not usable>", words) for words in said)
        finally:  # the child must not go on with the tests
            os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    group.destroy()
    assert repr(group) == "<ferry.Group, not usable>"
    assert repr(plan) == "<ferry.Plan, not usable>"
    assert repr(received) == "<ferry.Received: x f32 [3, 16]>"
