"""Collectives over dense tensors: gradients, parameters, batches."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from ferry import _ferry
from ferry.arguments import (
    INT32_MAX,
    INT64_MAX,
    UINT64_MAX,
    choice,
    describe,
    flag,
    instance,
    integer,
    loaded,
    refuse,
    seconds,
)
from ferry.errors import Error
from ferry.frameworks import as_numpy
from ferry.group import BACKENDS, DEFAULT_MEMORY_BYTES, FABRICS, MOST_MEMORY_BYTES, NETWORKS
from ferry.streams import CPU, Place, Streams, chosen_gpu
from ferry.tensors import (
    TORCH,
    Like,
    array,
    dtype_named,
    empty_array,
    is_torch_dtype,
    like_of,
    plain_view,
    view,
)

OPS = {
    "sum": _ferry.ReduceOp.sum,
    "mean": _ferry.ReduceOp.mean,
    "product": _ferry.ReduceOp.product,
    "min": _ferry.ReduceOp.min,
    "max": _ferry.ReduceOp.max,
}
ALGORITHMS = {
    "automatic": _ferry.Algorithm.automatic,
    "one_shot": _ferry.Algorithm.one_shot,
    "direct": _ferry.Algorithm.direct,
    "hierarchical": _ferry.Algorithm.hierarchical,
    "ring": _ferry.Algorithm.ring,
    "tree": _ferry.Algorithm.tree,
}
FORMATS = {
    "exact": _ferry.ReduceFormat.exact,
    "bf16": _ferry.ReduceFormat.bf16,
    "f16": _ferry.ReduceFormat.f16,
    "e4m3": _ferry.ReduceFormat.e4m3,
    "e5m2": _ferry.ReduceFormat.e5m2,
    "automatic": _ferry.ReduceFormat.automatic,
}
# Defaults, known by identity: calls that give nothing else are one call of C++.
_NO_SHARES: Sequence[int] = ()
_NO_SMS = 0
REDUCED_DTYPES = "f32, bf16, f16, i32, i64 or u8"
MOVED_DTYPES = "f32, bf16, f16, e4m3, e5m2, i32, i64 or u8; of another one its bytes: .view(uint8)"


class Choice(NamedTuple):
    """How an all_reduce travels, as `Collectives.choice` tells."""

    algorithm: str
    """"one_shot", "direct", "hierarchical", "ring" or "tree"."""
    shares: list[float]
    """The part that the ranks of each domain reduce, equally among them; not of ring and tree."""
    predicted_seconds: float
    """0 in one domain and of one_shot, where nothing is chosen."""
    observed_seconds: float
    """Of late, by this way and of about this size; 0: none yet."""
    latency_seconds: list[float]
    """Of the links of each domain, as known now: a link has the mean of both."""
    bytes_per_second: list[float]
    """The same: a link has the smaller of both, but for `slow_pairs`."""
    slow_pairs: list[tuple[int, int, float]]
    """Two domains and the bytes a second between them, where that is less than the network
    interfaces of both allow."""
    past_caches: bool
    """Ranks of one domain store what they show of ordinary tensors past the caches: where the cores
    share none, reading what another core wrote takes longer than memory."""


class Window:
    """Rows in registered memory of every rank, which each rank reads without the others.

    The rows of all ranks are numbered one behind the other, in ascending rank. A rank writes to
    its own; what it wrote before a call of all ranks, a barrier say, the others read after theirs.
    A rank's rows are there until it drops its Window and `rows`: before that, all ranks meet.
    """

    def __init__(self, raw: _ferry.Window, like: Like) -> None:
        self._raw = raw
        self._like = like
        self._flat_dtype = raw.rows.dtype

    @property
    def rows(self) -> Any:
        """This rank's own [rows, columns], at first 0."""
        return array(self._raw.rows, self._like)

    def first(self, rank: int) -> int:
        """The number of a rank's first row; of the number of ranks: how many rows there are."""
        return self._raw.first(integer("first: rank", rank, 0, INT32_MAX))

    def get(self, numbers: Any, out: Any) -> None:
        """Not collective: copies those rows. numbers: i64 or i32 [n]. out: [n, columns], dense, of
        the Window's dtype, or bytes that carry it."""
        self._raw.get(
            view("get: numbers", numbers, expected="i64 or i32")[0],
            view("get: out", out, self._flat_dtype, True)[0],
        )


class Collectives:
    """R ranks that reduce and gather dense tensors in CPU memory, or in that of their GPUs. All
    ranks make the same calls in the same order, but for `send` and `recv`. It may be made from the
    bootstrap of a `Group` or by itself, and has flags and registered memory of its own: its calls
    on one stream overlap those of a group on another.

    Arrays are contiguous, of any shape; NumPy, torch and what else speaks DLPack; for JAX and
    TensorFlow, `ferry.jax` and `ferry.tensorflow` have calls that return results. Arrays of `empty`
    are read and written in place by the ranks of the domain; others are copied once.

    f32, bf16 and f16 are reduced in fp32, over the ranks of each domain in ascending order, then
    over the domains, and rounded once: every rank has the same bits, whatever the fabric. i32, i64
    and u8 wrap around. Calls that only move take e4m3 and e5m2, too, and of other dtypes the bytes.

    Args:
        bootstrap: how the ranks find each other: `threads`, `tcp`, `from_environment`, ...
        deadline: seconds, of every wait. What is late raises `DeadlineExceededError`.
        memory_bytes: registered for `empty`.
        fabric, sim_seed, domain_size, network: as of a `Group`.
        backend: "host" or "automatic": tensors in CPU memory. "cuda": on one GPU a rank; those of
            a domain reach each other's memory, and what crosses goes through CPU memory.
        device: cuda: as of a `Group`.

    Use it as a context manager to leave at the end of the block. Calls return a `ferry.Event`:
    without a stream it is complete; with one, the arrays are kept until it is. On a GPU a call
    without a stream runs on torch's current one, as torch's own work does.
    """

    def __init__(
        self,
        bootstrap: _ferry.Bootstrap,
        *,
        deadline: float = 60.0,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        fabric: str = "automatic",
        sim_seed: int = 1,
        domain_size: int = 0,
        network: str = "automatic",
        backend: str = "automatic",
        device: Any = None,
    ) -> None:
        chosen = choice("Collectives: backend", backend, BACKENDS)
        if device is not None and chosen != _ferry.Backend.cuda:
            refuse("Collectives: device", describe(device), 'None, or backend="cuda"')
        gpu = None
        if chosen == _ferry.Backend.cuda:
            gpu = chosen_gpu(device) if _ferry.has_cuda else -1
        self._raw = _ferry.Collectives(
            instance("Collectives: bootstrap", bootstrap, _ferry.Bootstrap, "a ferry.Bootstrap"),
            seconds("Collectives: deadline", deadline),
            integer("Collectives: memory_bytes", memory_bytes, 0, MOST_MEMORY_BYTES),
            choice("Collectives: fabric", fabric, FABRICS),
            integer("Collectives: sim_seed", sim_seed, 0, UINT64_MAX),
            integer("Collectives: domain_size", domain_size, 0, INT32_MAX),
            choice("Collectives: network", network, NETWORKS),
            chosen,
            -1 if gpu is None else gpu,
        )
        if gpu == -1:
            gpu = self._raw.empty([1], _ferry.Dtype.u8).gpu
        self._gpu = gpu
        self._streams = Streams(gpu)
        self._done = _ferry.Event()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._raw.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._raw.size

    @property
    def domains(self) -> int:
        """Number of domains: ranks that share memory are in one."""
        return self._raw.domains

    @property
    def fabric_name(self) -> str:
        """By which wire the ranks reach each other, as `Group.fabric_name`."""
        return self._raw.fabric_name

    @property
    def destroyed(self) -> bool:
        """True after `destroy`."""
        return self._raw.destroyed

    def all_reduce(
        self,
        x: Any,
        *,
        op: str = "sum",
        dtype: Any = None,
        stream: Any = None,
        algorithm: str = "automatic",
        shares: Sequence[int] = _NO_SHARES,
        any_order: bool = False,
        num_sms: int = _NO_SMS,
        format: str = "exact",
    ) -> _ferry.Event:
        """Collective. Overwrites x with its reduction over all ranks.

        Args:
            x: f32, bf16, f16, i32, i64 or u8, contiguous; the same number of elements everywhere.
            op: "sum", "mean" (of floats), "product", "min" or "max".
            dtype: of x, where its array cannot say it ("bf16" beside uint16).
            stream: None: returns when it is done; a ferry.Stream.
            algorithm: "one_shot" (up to 16 KiB), "direct", "hierarchical", "ring" or "tree", the
                same on all ranks; "automatic": whichever is expected to take the least time. Ring
                and tree sum in another order (ferry/collectives.hpp). GPUs of one domain have
                "one_shot" (up to 256 KiB, less beyond 4 ranks) and "direct", those of several all
                but "one_shot".
            shares: of direct and hierarchical, one for each domain, the same on all ranks: its
                ranks reduce elements in proportion. Empty: as the links allow. Refused on GPUs of
                one domain, and with "one_shot", "ring" and "tree".
            any_order: "automatic" may be ring or tree, too, by what links are like, so that the
                last bits of floats may differ from run to run.
            num_sms: on GPUs: how many multiprocessors run the call, the same on all ranks, 1 to
                all; 0: a default, of which small tensors use fewer.
            format: as what sums and means of f32 cross between domains: "exact", "bf16", "f16",
                "e4m3" or "e5m2" (with a scale for each 128 elements) or "automatic"; see
                `compression`.
                Results of another than "exact" are rounded, to the same bits on all ranks.
        """
        if (
            algorithm == "automatic"
            and shares is _NO_SHARES
            and any_order is False
            and format == "exact"
            and self._is_plain(dtype, stream, num_sms)
            and self._raw.all_reduce_plain(x, choice("all_reduce: op", op, OPS))
        ):
            return self._done
        place = self._streams.place("all_reduce", stream, x)
        event = self._raw.all_reduce(
            _view("all_reduce: x", x, dtype, place, True, REDUCED_DTYPES),
            choice("all_reduce: op", op, OPS),
            place.stream,
            choice("all_reduce: algorithm", algorithm, ALGORITHMS),
            _integers("all_reduce: shares", shares, 65535),
            flag("all_reduce: any_order", any_order),
            integer("all_reduce: num_sms", num_sms, 0, INT32_MAX),
            choice("all_reduce: format", format, FORMATS),
        )
        return _finished(place, event)

    def choice(self, bytes: int, *, any_order: bool = False) -> Choice:
        """What an automatic all_reduce of so many bytes of f32 would do now; the same on all
        ranks. Not collective."""
        told = self._raw.choice(
            integer("choice: bytes", bytes, 0, UINT64_MAX), flag("choice: any_order", any_order)
        )
        return Choice(
            told.algorithm.name,
            told.shares,
            told.predicted_seconds,
            told.observed_seconds,
            told.latency_seconds,
            told.bytes_per_second,
            told.slow_pairs,
            told.past_caches,
        )

    def reduce_scatter(
        self,
        x: Any,
        out: Any,
        *,
        op: str = "sum",
        dtype: Any = None,
        stream: Any = None,
        num_sms: int = _NO_SMS,
        format: str = "exact",
    ) -> _ferry.Event:
        """Collective. x: `size` equal blocks; `out`, which may be block `rank` of x, takes
        the reduction of that block. The other arguments are those of `all_reduce`."""
        if (
            format == "exact"
            and self._is_plain(dtype, stream, num_sms)
            and self._raw.reduce_scatter_plain(x, out, choice("reduce_scatter: op", op, OPS))
        ):
            return self._done
        place = self._streams.place("reduce_scatter", stream, x)
        event = self._raw.reduce_scatter(
            _view("reduce_scatter: x", x, dtype, place, False, REDUCED_DTYPES),
            _view("reduce_scatter: out", out, dtype, place, True),
            choice("reduce_scatter: op", op, OPS),
            place.stream,
            integer("reduce_scatter: num_sms", num_sms, 0, INT32_MAX),
            choice("reduce_scatter: format", format, FORMATS),
        )
        return _finished(place, event)

    def all_gather(
        self, x: Any, out: Any, *, dtype: Any = None, stream: Any = None, num_sms: int = _NO_SMS
    ) -> _ferry.Event:
        """Collective. `out` takes x of all ranks, in ascending order. x may be block
        `rank` of `out`."""
        if self._is_plain(dtype, stream, num_sms) and self._raw.all_gather_plain(x, out):
            return self._done
        place = self._streams.place("all_gather", stream, x)
        event = self._raw.all_gather(
            _view("all_gather: x", x, dtype, place),
            _view("all_gather: out", out, dtype, place, True),
            place.stream,
            integer("all_gather: num_sms", num_sms, 0, INT32_MAX),
        )
        return _finished(place, event)

    def broadcast(
        self, x: Any, root: int, *, dtype: Any = None, stream: Any = None, num_sms: int = _NO_SMS
    ) -> _ferry.Event:
        """Collective. Overwrites x with that of rank `root`."""
        source = integer("broadcast: root", root, 0, self.size - 1)
        if self._is_plain(dtype, stream, num_sms) and self._raw.broadcast_plain(x, source):
            return self._done
        place = self._streams.place("broadcast", stream, x)
        event = self._raw.broadcast(
            _view("broadcast: x", x, dtype, place, True),
            source,
            place.stream,
            integer("broadcast: num_sms", num_sms, 0, INT32_MAX),
        )
        return _finished(place, event)

    def all_to_all(
        self,
        x: Any,
        out: Any,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        dtype: Any = None,
        stream: Any = None,
        num_sms: int = _NO_SMS,
    ) -> _ferry.Event:
        """Collective. Block p of x goes to rank p; `out` takes what comes, in ascending order of
        the sources.

        send_counts, recv_counts: elements for each rank and from each, both or none; None: equal
        blocks. Raises `MismatchError` on all ranks where one expects another number than it is
        sent.
        """
        if (send_counts is None) != (recv_counts is None):
            refuse("all_to_all: recv_counts", "one of the two", "send_counts and recv_counts")
        if (
            send_counts is None
            and self._is_plain(dtype, stream, num_sms)
            and self._raw.all_to_all_plain(x, out)
        ):
            return self._done
        place = self._streams.place("all_to_all", stream, x)
        event = self._raw.all_to_all(
            _view("all_to_all: x", x, dtype, place),
            _view("all_to_all: out", out, dtype, place, True),
            self._counts("send_counts", send_counts),
            self._counts("recv_counts", recv_counts),
            place.stream,
            integer("all_to_all: num_sms", num_sms, 0, INT32_MAX),
        )
        return _finished(place, event)

    def send(
        self, x: Any, peer: int, tag: int = 0, *, dtype: Any = None, stream: Any = None
    ) -> _ferry.Event:
        """Between two ranks: x goes to rank `peer`, which receives it into an array
        of as many bytes. Ends when the peer has asked for it. Transfers of two
        ranks match by tag, in the order in which they begin: on one stream, or without, that of
        the calls; on several streams give them tags of their own. Where sizes differ, both raise
        `MismatchError`.

        On a stream, transfers that follow each other are under way together: two ranks may each
        send before they receive. Other work of the stream waits for them.

        On GPUs of one domain each waits for those before it on its stream: of two ranks that send
        to each other one receives first, or on another stream. What is not of `empty` is copied
        once. To a rank of another domain a send does not hold the stream, only its event ends when
        the peer has asked for it. Not in graphs.
        """
        place = self._streams.place("send", stream, x)
        raw = _view("send: x", x, dtype, place)
        return _finished(place, self._raw.send(raw, *self._peer("send", peer, tag), place.stream))

    def recv(
        self, x: Any, peer: int, tag: int = 0, *, dtype: Any = None, stream: Any = None
    ) -> _ferry.Event:
        """The other side of `send`: overwrites x with what rank `peer` sends."""
        place = self._streams.place("recv", stream, x)
        raw = _view("recv: x", x, dtype, place, True)
        return _finished(place, self._raw.recv(raw, *self._peer("recv", peer, tag), place.stream))

    def window(self, rows: int, columns: int, dtype: Any = "f32", like: Any = None) -> Window:
        """Collective. Rows of this rank in registered memory that other ranks read by themselves;
        columns and dtype as on all ranks. dtype, like: as of `empty`.

        Raises `ExhaustedError` on all ranks where memory_bytes of one do not hold its rows, and
        `UnsupportedError` with several domains or backend "cuda".
        """
        chosen = TORCH if like is None and is_torch_dtype(dtype) else like_of("window: like", like)
        raw = self._raw.window(
            integer("window: rows", rows),
            integer("window: columns", columns),
            dtype_named("window: dtype", dtype),
        )
        return Window(raw, chosen)

    def barrier(self) -> None:
        """Collective. Returns when every rank has called it."""
        self._raw.barrier()

    def empty(self, shape: tuple[int, ...], dtype: Any = "f32", like: Any = None) -> Any:
        """A dense array in registered memory, as `Group.empty`. Not collective."""
        return empty_array(self._raw.empty, shape, dtype, like, self._gpu)

    def memory(self) -> _ferry.MemoryStats:
        """Bytes that this rank holds, exact."""
        return self._raw.memory()

    def time(self) -> _ferry.TimeStats:
        """Nanoseconds that this rank has spent inside collectives since creation."""
        return self._raw.time()

    def network(self) -> _ferry.NetworkStats:
        """What this rank has sent to ranks of other domains since creation."""
        return self._raw.network()

    def compression(self) -> _ferry.CompressionStats:
        """What this rank has encoded since creation, what fell back and why, and the error."""
        return self._raw.compression()

    def destroy(self) -> None:
        """Leaves. Not collective, never waits for peers; those that still exchange get
        `PeerLeftError`. Later calls raise `DestroyedError`."""
        self._raw.destroy()

    def _is_plain(self, dtype: Any, stream: Any, num_sms: int) -> bool:
        """Whether a call is one of C++, if its arrays are plain ones."""
        return dtype is None and stream is None and num_sms is _NO_SMS and self._gpu is None

    def _peer(self, call: str, peer: int, tag: int) -> tuple[int, int]:
        return (
            integer(f"{call}: peer", peer, 0, self.size - 1),
            integer(f"{call}: tag", tag, -INT32_MAX - 1, INT32_MAX),
        )

    def _counts(self, name: str, counts: Sequence[int] | None) -> list[int]:
        if counts is None:
            return []
        given = _integers(f"all_to_all: {name}", counts, INT64_MAX)
        if len(given) != self.size:
            refuse(f"all_to_all: {name}", f"{len(given)} counts", f"{self.size}, one for each rank")
        return given

    def __enter__(self) -> Collectives:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()

    def __repr__(self) -> str:
        try:
            if "_raw" in self.__dict__ and not self.destroyed:
                return (
                    f"<ferry.Collectives: rank {self.rank} of {self.size}, "
                    f"fabric {self.fabric_name}>"
                )
        except Error:  # in a forked child; or destroyed by another thread meanwhile
            pass
        return "<ferry.Collectives, not usable>"


def _view(
    name: str,
    value: Any,
    dtype: Any,
    place: Place = CPU,
    writable: bool = False,
    expected: str = MOVED_DTYPES,
) -> _ferry.View:
    if dtype is None and place.gpu is None:
        plain = plain_view(name, value, writable)
        if plain is not None:
            return plain
    tag = None if dtype is None else dtype_named(f"{name.partition(':')[0]}: dtype", dtype)
    return view(name, _flat(name, value, writable, place), tag, writable, expected, place)[0]


def _integers(name: str, values: Any, high: int) -> list[int]:
    try:
        items = list(values)
    except TypeError:
        refuse(name, describe(values), "a sequence of integers")
    return [integer(name, item, 0, high) for item in items]


def _finished(place: Place, event: _ferry.Event) -> _ferry.Event:
    if place.finish:
        event.wait()
    return event


def _flat(name: str, value: Any, writable: bool, place: Place) -> Any:
    """The same memory in one dimension; of other frameworks as it is, up to three."""
    torch = loaded("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_contiguous():
            refuse(name, f"a tensor with strides {tuple(value.stride())}", "a contiguous one")
        return value.view(-1) if value.layout == torch.strided and value.dim() != 1 else value
    numpy = loaded("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if not value.flags.c_contiguous:
            refuse(name, f"an array with strides of {value.strides} bytes", "a contiguous one")
        return value.reshape(-1)
    if isinstance(value, (int, float, list, tuple)):
        refuse(name, describe(value), "an array")
    immutable = as_numpy(name, value, writable) if place.gpu is None else None
    return value if immutable is None else immutable[0].reshape(-1)


__all__ = ["Choice", "Collectives", "Window"]
