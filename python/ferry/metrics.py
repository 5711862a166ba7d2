"""Counters of groups: as a dict, and for Prometheus."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from ferry.arguments import describe, integer, refuse, text
from ferry.errors import SystemCallError, UnsupportedError
from ferry.handles import groups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CALLS = {
    "calls": "Calls; of one with a hook, both halves.",
    "failed": "Calls that raised.",
    "rows": "Rows that dispatches received and combines returned.",
    "bytes": "Bytes of those rows.",
    "seconds": "Seconds inside calls, waits included.",
    "wait_seconds": "Seconds of those waiting for peers.",
}
_WAITS = {"waits": "Waits for peers.", "seconds": "Seconds in those waits."}
_GROUP = {
    "failures": "Failures of the group.",
    "masked": "Times that latency exchanges went on without a rank.",
    "growths": "Segments registered after creation.",
}
_NETWORK = {
    "put_bytes": "Bytes sent to other domains.",
    "puts": "Writes that carried them.",
    "signals": "Flags sent to other domains.",
}
_MEMORY = ("control_bytes", "arena_bytes", "arena_used_bytes", "latency_bytes")
_lock = threading.Lock()
_port: int | None = None


def metrics_of(group: Any) -> dict[str, Any]:
    """What `Group.metrics` returns."""
    raw = group._raw.metrics()
    network, memory, view = group.network(), group.memory(), group.view()
    return {
        "rank": group.rank,
        "size": group.size,
        "fabric": group.fabric_name,
        "epoch": view.epoch,
        "ranks": list(view.ranks),
        "calls": {
            of.call: {
                "calls": of.calls,
                "failed": of.failed,
                "rows": of.rows,
                "bytes": of.bytes,
                "seconds": of.ns / 1e9,
                "wait_seconds": of.wait_ns / 1e9,
            }
            for of in raw.calls
        },
        "waits": {of.stage: {"waits": of.waits, "seconds": of.ns / 1e9} for of in raw.waits},
        **{name: getattr(raw, name) for name in _GROUP},
        "network": {name: getattr(network, name) for name in _NETWORK},
        "memory": {name: getattr(memory, name) for name in _MEMORY},
    }


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise UnsupportedError(
            "metrics for Prometheus need the package prometheus_client: "
            "pip install prometheus_client"
        ) from error
    return prometheus_client


class _Collector:
    """Groups as Prometheus sees them; `only`: one of them, or all that are alive."""

    def __init__(self, only: Any = None) -> None:
        self._only = only

    def collect(self) -> Iterator[Any]:
        core = _client().core
        some = groups() if self._only is None else [self._only]
        read = [(str(group.handle), metrics_of(group)) for group in some if not group.destroyed]
        read.sort(key=lambda of: int(of[0]))

        def family(name: str, help_: str, labels: list[str], rows: Any, gauge: bool = False) -> Any:
            kind = core.GaugeMetricFamily if gauge else core.CounterMetricFamily
            made = kind(f"ferry_{name}", help_, labels=["group", "rank", *labels])
            for number, of in read:
                for values, number_of in rows(of):
                    made.add_metric([number, str(of["rank"]), *values], number_of)
            return made

        def each(part: str, name: str) -> Any:
            return lambda of: [([key], row[name]) for key, row in of[part].items()]

        for name, help_ in _CALLS.items():
            yield family(
                f"call_{name}".replace("call_calls", "calls"), help_, ["call"], each("calls", name)
            )
        for name, help_ in _WAITS.items():
            yield family(f"stage_{name}", help_, ["stage"], each("waits", name))
        for name, help_ in _GROUP.items():
            yield family(name, help_, [], lambda of, name=name: [([], of[name])])
        for name, help_ in _NETWORK.items():
            yield family(
                f"network_{name}", help_, [], lambda of, name=name: [([], of["network"][name])]
            )
        memory = "Registered bytes by use; arena_used is part of arena."
        yield family(
            "memory_bytes",
            memory,
            ["use"],
            lambda of: [([use.removesuffix("_bytes")], of["memory"][use]) for use in _MEMORY],
            gauge=True,
        )
        yield family("ranks", "Ranks of the group.", [], lambda of: [([], len(of["ranks"]))], True)
        yield family("epoch", "Counts the memberships.", [], lambda of: [([], of["epoch"])], True)


def _registry(only: Any = None) -> Any:
    registry = _client().CollectorRegistry(auto_describe=False)
    registry.register(_Collector(only))
    return registry


def text_of(group: Any) -> str:
    """What `Group.metrics_text` returns."""
    made: bytes = _client().generate_latest(_registry(group))
    return made.decode()


def serve_metrics(port: int = 0, host: str = "127.0.0.1") -> int:
    """Serve the counters of all groups of this process to Prometheus, at http://host:port/metrics,
    by a thread of its own; returns the port. A second call returns the first one's.

    port: 0: any that is free. host: the loopback address, unless others shall read them.
    The environment does the same: FERRY_METRICS_PORT=9400, read when a group is made, serves at
    9400 + LOCAL_RANK.
    """
    global _port
    integer("serve_metrics: port", port, 0, 65535)
    text("serve_metrics: host", host)
    with _lock:
        if _port is None:
            try:
                server, _ = _client().start_http_server(port, addr=host, registry=_registry())
            except OSError as error:
                raise SystemCallError(
                    f"serve_metrics: port {port} of {host}: {error.strerror}; take another one, "
                    "or give serve_metrics 0 for any that is free"
                ) from error
            _port = int(server.server_port)
        return _port


def serve_as_environment_says() -> None:
    """`serve_metrics`, if FERRY_METRICS_PORT is set."""
    value = os.environ.get("FERRY_METRICS_PORT", "")
    if not value:
        return
    local = os.environ.get("LOCAL_RANK") or "0"
    if not (value.isdecimal() and local.isdecimal() and 0 < int(value) + int(local) < 65536):
        refuse(
            "environment variable FERRY_METRICS_PORT",
            f"{describe(value)} and LOCAL_RANK {describe(local)}",
            "a port: LOCAL_RANK is added to it",
        )
    serve_metrics(int(value) + int(local))
