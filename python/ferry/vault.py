"""State that survives its rank: versions of tensors, kept in the memory of another rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ferry import _ferry
from ferry.arguments import INT64_MAX, UINT64_MAX, describe, instance, integer, loaded, refuse
from ferry.group import Group
from ferry.streams import CPU, Place
from ferry.tensors import on_gpu, view


def _of_torch(name: str, tensor: Any, torch: Any) -> tuple[Any, str]:
    if tensor.is_quantized:
        refuse(name, f"dtype {tensor.dtype}", "elements without a scale: int_repr(), dequantize()")
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        refuse(name, f"layout {layout}", "a dense tensor")
    for lazy, kind, resolve in (
        (tensor.is_conj(), "conjugate", "resolve_conj()"),
        (tensor.is_neg(), "negative", "resolve_neg()"),
    ):
        if lazy:
            refuse(name, f"a {kind} view", f"a tensor of its own elements: {resolve}")
    if not tensor.is_contiguous():
        refuse(name, f"strides {tuple(tensor.stride())}", "a contiguous tensor")
    plain = tensor.detach().reshape(-1).view(torch.uint8)
    return plain, str(tensor.dtype).removeprefix("torch.")


def _of_numpy(name: str, array: Any, numpy: Any) -> tuple[Any, str]:
    dtype = array.dtype
    if isinstance(array, numpy.ma.MaskedArray):
        refuse(name, "a masked array", "an array of all its elements: filled(), data")
    if not array.flags.c_contiguous:
        refuse(name, f"strides {array.strides}", "a contiguous array")
    if dtype.hasobject:
        refuse(name, f"dtype {dtype}", "elements that are plain bytes")
    if dtype.names is not None:
        refuse(name, f"dtype {dtype}", "an array of each of the fields")
    if not dtype.isnative:
        refuse(name, f"dtype {dtype.str}", "the byte order of this machine")
    return numpy.asarray(array).reshape(-1).view(numpy.uint8), dtype.name


def _bytes_of(
    name: str, tensor: Any, writable: bool, place: Place | None
) -> tuple[_ferry.View, str]:
    """The bytes of a dense tensor of any dtype as u8, and its dtype and shape in words.

    place: of tensors on GPUs; None: any, and nothing is copied.
    """
    torch = loaded("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        plain, dtype = _of_torch(name, tensor, torch)
    else:
        numpy = loaded("numpy")
        if numpy is None or not isinstance(tensor, numpy.ndarray):
            refuse(name, describe(tensor), "an array of NumPy or torch")
        plain, dtype = _of_numpy(name, tensor, numpy)
    where = place if place is None or on_gpu(tensor) else CPU
    raw, _ = view(name, plain, None, writable, place=where)
    return raw, f"{dtype}{list(tensor.shape)}"


def _several(tensors: Any) -> Sequence[Any]:
    return tensors if isinstance(tensors, (list, tuple)) else [tensors]


def _parts(
    call: str, key: Any, tensors: Any, place: Place | None, writable: bool = False
) -> list[_ferry.VaultPart]:
    number = integer(f"{call}: key", key, -INT64_MAX, INT64_MAX)
    name = f"{call}: key {number}, tensor"
    return [
        _ferry.VaultPart(number, *_bytes_of(f"{name} {i}", each, writable, place))
        for i, each in enumerate(_several(tensors))
    ]


def _all_parts(call: str, tensors: Any, place: Place | None) -> list[_ferry.VaultPart]:
    return [part for key, each in tensors.items() for part in _parts(call, key, each, place)]


def _checked(call: str, tensors: Any) -> Mapping[int, Any]:
    if not isinstance(tensors, Mapping):
        refuse(f"{call}: tensors", describe(tensors), "a dict from keys to tensors")
    return tensors


class Vault:
    """Versions of the state of all ranks of a group. What a rank puts lies in the registered memory
    of the next rank of the view, which keeps it when the rank dies; in a group of several domains a
    copy lies in the next domain, so that a host may vanish. On all ranks:

    1. `recover` once at first, and after each `Group.regroup`, also in a process that joined. It
       says which version all have whole; each rank takes its tensors from there with `get`.
    2. After `Group.commit(s)`, and when the tensors are those of step s: `put(s, ...)`, on all
       ranks at the same steps, as often as the program wants.

    A rank that dies while it puts leaves the version before, on all ranks alike. Two versions of
    each rank are kept: 2 * version_bytes, rounded up to 64, + 64 bytes of registered memory on each
    rank (twice that in several domains, and more where a smaller domain keeps for a larger one),
    and as much again on the keeper of a lost rank as long as its state is kept. The memory grows if
    need be. A rank that dies together with the one that keeps its state takes it along.

    Tensors are arrays of NumPy or torch, dense and contiguous, of any dtype whose elements are
    plain bytes in this machine's order; no fields, masks, scales, or lazy views. They lie in CPU
    memory or, in a group on GPUs, on the rank's GPU; what was put lies in CPU memory there, too,
    and outlives the process and its GPU's memory. One
    vault a group, whose versions a new object of the same version_bytes takes up when this one is
    dropped; and where groups can `regroup`: others raise `UnsupportedError`.

    Args:
        version_bytes: the most that one rank puts, by `bytes_of`; the same on all ranks.
    """

    def __init__(self, group: Group, version_bytes: int) -> None:
        self._group = group = instance("Vault: group", group, Group, "a ferry.Group")
        self._raw = _ferry.Vault(
            group._raw, integer("Vault: version_bytes", version_bytes, 0, INT64_MAX)
        )

    @staticmethod
    def bytes_of(tensors: Mapping[int, Any]) -> int:
        """Of a version: 64 + the sum of 128 + its bytes, rounded up to 64, of each tensor."""
        return _ferry.Vault.bytes_of(_all_parts("bytes_of", _checked("bytes_of", tensors), None))

    def recover(self, wanted: Iterable[int] = ()) -> int | None:
        """Collective. The newest step for which all ranks, those lost since too, have put all they
        had; from here on it is the group's committed step. None: there is none. What a lost rank
        had put is kept until those that are left have put two versions. Raises `MismatchError` on
        all ranks, and drops nothing, when ranks have skipped puts and no step is left that all
        have.

        wanted: keys that this rank will `get`. Those that lie in other domains come over the
        network now, into registered memory that is free again from the next put on; without several
        domains it changes nothing. Keys that nobody has put are ignored.
        """
        if not isinstance(wanted, Iterable):
            refuse("recover: wanted", describe(wanted), "keys")
        keys = [integer("recover: wanted", key, -INT64_MAX, INT64_MAX) for key in wanted]
        return self._raw.recover(keys)

    def keys(self) -> list[int]:
        """The keys of the version that `recover` named, of all ranks, ascending."""
        return self._raw.keys()

    def _place(self, call: str, stream: Any, tensors: Iterable[Any]) -> Place:
        """Of the tensors that lie on the GPU. When the call returns they are read or written."""
        main = next((each for each in tensors if on_gpu(each)), None)
        place = self._group._streams.place(call, stream, main)
        unordered = main is None and stream is None
        return Place(place.gpu, None if unordered else place.stream, ordered=True)

    def get(self, key: int, out: Any | Sequence[Any], *, stream: Any = None) -> None:
        """Copies the tensors of a key of that version into `out`, one or a list, whichever rank has
        put them; this rank's own first, else the lowest's (of its own domain, if one there has
        any). Not collective; between `recover` and this rank's next `commit`. Raises
        `InvalidArgumentError` unless they are as many, of the same dtypes and shapes, and for a key
        of another domain that `recover` was not given.

        stream: as of `put`.
        """
        number = integer("get: key", key, -INT64_MAX, INT64_MAX)
        place = self._place("get", stream, _several(out))
        self._raw.get(number, _parts("get", number, out, place, True), place.stream)

    def put(self, step: int, tensors: Mapping[int, Any], *, stream: Any = None) -> None:
        """Copies tensors to the rank that keeps them: one pass over their bytes. Not collective,
        and waits for nobody. In several domains it is collective: it copies them here, then to the
        keeper, and returns when the copies that this rank keeps have come.

        step: the one that was committed last, or 0 before any. tensors: from keys to a tensor or a
        list of them, for example {expert: [weights, momentum]}. Raises `ExhaustedError` when they
        are more than version_bytes. stream: of tensors on a GPU, which are copied after what is on
        it now; None: torch's current stream. They are copied when the call returns, so it waits for
        what computes them. No stream that is captured into a graph.
        """
        number = integer("put: step", step, 0, UINT64_MAX)
        given = _checked("put", tensors)
        each = (one for several in given.values() for one in _several(several))
        place = self._place("put", stream, each)
        self._raw.put(number, _all_parts("put", given, place), place.stream)
