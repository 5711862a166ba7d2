"""The bodies of tests of V2, V2.5 and HybridEP give every argument of every call: one that nobody
gives is tested by nobody."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bucket_bodies
import elastic_bodies
import hybrid_bodies
import pytest
import test_bucket
import test_elastic
import test_engram
import test_ep
import test_gathering
import test_hybrid
import test_pipeline
import torch
from rank_buffers import run_buffers

import deep_ep

CLASSES = (
    deep_ep.ElasticBuffer,
    deep_ep.EPBuffer,
    deep_ep.BucketBuffer,
    deep_ep.BucketSession,
    deep_ep.EngramBuffer,
    deep_ep.PPBuffer,
    deep_ep.HybridEPBuffer,
    deep_ep.BufferAllocator,
)
TESTS: tuple[Any, ...] = (
    lambda: test_ep.test_wrong_dispatches({"do_handle_copy": True}, "do_handle_copy"),
    lambda: test_elastic.test_every_argument_of_the_constructor(2),
    test_elastic.test_size_hints,
    lambda: test_ep.test_every_argument_of_the_constructor(2),
    test_ep.test_plans,
    lambda: test_bucket.test_several_groups_share_the_storage(2),
    test_bucket.test_what_is_refused,
    lambda: test_engram.test_every_argument(1),
    lambda: test_engram.test_layers(1, torch.float8_e4m3fn),
    lambda: test_engram.test_of_an_elastic_buffer(1),
    lambda: test_gathering.test_sessions(2),
    lambda: test_pipeline.test_around_the_ring(2),
    test_pipeline.test_what_is_refused,
    test_pipeline.test_size_hints,
    lambda: test_hybrid.test_settings(1),
    lambda: test_hybrid.test_deprecated_arguments_say_so(1),
)
NOTHING_ELSE = {  # the only values that there are, for callers that pass them
    ("EPBuffer", "dispatch", "do_handle_copy"),
    ("EPBuffer", "lb_prefetch_weights", "num_sms"),
    ("EPBuffer", "lb_reduce_grads", "num_sms"),
}
ONLY_ON_GPUS = {"get_comm_stream"}


def methods(cls: Any) -> Iterator[tuple[str, Any]]:
    """What callers see, its own and what it has from others."""
    for name, one in inspect.getmembers(cls, callable):
        if name == "__init__" or (not name.startswith("_") and inspect.isroutine(one)):
            yield name, one


@contextmanager
def recorded() -> Iterator[set[tuple[str, str, str]]]:
    """(class, call, argument) of each argument that was not its default, and (class, call, "")."""
    given: set[tuple[str, str, str]] = set()

    def spy(cls: Any, name: str, call: Any) -> Any:
        signature = inspect.signature(call)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            own = args[0] if args and isinstance(args[0], CLASSES) else None
            kind = (cls if own is None else type(own)).__name__
            given.add((kind, name, ""))
            for argument, value in signature.bind(*args, **kwargs).arguments.items():
                if value is not signature.parameters[argument].default:
                    given.add((kind, name, argument))
            return call(*args, **kwargs)

        return wrapped

    patch = pytest.MonkeyPatch()
    for cls in CLASSES:
        for name, one in methods(cls):
            static = isinstance(inspect.getattr_static(cls, name), staticmethod)
            made = spy(cls, name, one)
            patch.setattr(cls, name, staticmethod(made) if static else made)
    try:
        yield given
    finally:
        patch.undo()


def test_the_bodies_give_the_arguments() -> None:
    wanted = {
        (cls.__name__, name, argument)
        for cls in CLASSES
        for name, one in methods(cls)
        if name not in ONLY_ON_GPUS
        for argument in ("", *inspect.signature(one).parameters)
        if argument not in ("self", "kwargs")
    }
    with recorded() as given:
        for kind, bodies in (
            (deep_ep.ElasticBuffer, elastic_bodies.EVERYWHERE),
            (deep_ep.EPBuffer, elastic_bodies.EVERYWHERE + elastic_bodies.DEFERRED),
            (deep_ep.Buffer, bucket_bodies.ALL),
        ):
            for body in bodies:
                run_buffers(1, lambda buffer, body=body: body(buffer, "cpu"), kind=kind)
        for body in hybrid_bodies.ALL:
            how = test_hybrid.HYBRID
            run_buffers(1, lambda buffer, body=body: body(buffer, "cpu"), **how)
        for test in TESTS:
            test()
    assert sorted(wanted - given - NOTHING_ELSE) == []
