"""What the exchanges of throughput mode bring."""

from __future__ import annotations

from functools import cached_property
from types import GenericAlias

from ferry import _ferry
from ferry.errors import UnsupportedError
from ferry.tensors import Like, array

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Generic, TypeVar

    ArrayT = TypeVar("ArrayT")
    """An array of NumPy, torch, CuPy, JAX or TensorFlow: what goes in decides what comes out."""
else:
    ArrayT = None

    class Generic:
        """Without `typing`."""

        __class_getitem__ = classmethod(GenericAlias)


def summary(name: str, raw: Any, fields: tuple[str, ...], out: Any = None) -> str:
    """A repr of a result: the dtypes and shapes of its tensors, and whether they are there yet."""
    words = []
    try:
        for field in fields:
            tensor = getattr(raw, field)
            if field == "x" and tensor is None:
                tensor = out
            if tensor is not None:
                dtype = getattr(tensor.dtype, "name", str(tensor.dtype).removeprefix("torch."))
                words.append(f"{field} {dtype} {list(tensor.shape)}")
        if not raw.event.ready():
            words.append("under way")
    except UnsupportedError:  # in a forked child
        return f"<ferry.{name}, not usable>"
    return f"<ferry.{name}: {', '.join(words)}>"


class Result(Generic[ArrayT]):
    """What a call brings: Ferry's own tensors, and the caller's `out` where one was given."""

    _shown: tuple[str, ...] = ("x",)  # the tensors of a repr

    def __init__(self, raw: Any, like: Like, out: ArrayT | None = None) -> None:
        self._raw = raw
        self._like = like
        self._out = out

    @property
    def event(self) -> _ferry.Event:
        """Complete when the arrays are valid; so it is at once for a call without a stream."""
        event: _ferry.Event = self._raw.event
        return event

    def __repr__(self) -> str:
        return summary(type(self).__name__, self._raw, self._shown, self._out)

    def _array(self, tensor: _ferry.Tensor | None) -> ArrayT:
        result: ArrayT = array(tensor, self._like)
        return result


class Received(Result[ArrayT]):
    """What a dispatch brings. The arrays lie in registered memory, which goes back to the group
    when this object and the arrays taken from it are dropped; `untyped_storage().resize_(0)` of a
    torch tensor is as good as dropping that tensor.

    n: rows received, one for each (token, this rank), ascending source rank, then token.
    N: rows of `x`: n, or those of the expert-major output, or `max_recv_rows`.
    """

    _shown = ("x", "scales", "topk_weights")
    _raw: _ferry.Received

    @cached_property
    def x(self) -> ArrayT:
        """[N, H] in the requested order, dtype of the input, or e4m3."""
        if self._out is None:
            return self._array(self._raw.x)
        tensor = self._raw.x
        whole: Any = self._out
        rows = whole.shape[0] if tensor is None else tensor.shape[0]
        return self._out if rows == whole.shape[0] else whole[:rows]

    @cached_property
    def scales(self) -> ArrayT | None:
        """f32 [N, C] when scales were given or made, in the order of `x`."""
        return self._array(self._raw.scales)

    @cached_property
    def topk_idx(self) -> ArrayT:
        """i64 [n, K], rank-major: local expert ids, -1 = not on this rank."""
        return self._array(self._raw.topk_idx)

    @cached_property
    def topk_weights(self) -> ArrayT | None:
        """f32 [n, K], rank-major, when weights were given: 0 where a slot is not local."""
        return self._array(self._raw.topk_weights)

    @cached_property
    def source_token(self) -> ArrayT:
        """i32 [n], rank-major: index of the token at its owner."""
        return self._array(self._raw.source_token)

    @cached_property
    def slot_rows(self) -> ArrayT | None:
        """i64 [n, K], expert-major only: row of `x` of each slot, -1 = none. May be the plan's own,
        shared with later results and used by later calls: only to be read."""
        return self._array(self._raw.slot_rows)

    @cached_property
    def expert_offsets(self) -> ArrayT | None:
        """i64 [local experts + 1], expert-major only: first row of every expert; the end. Only to
        be read, as `slot_rows`."""
        return self._array(self._raw.expert_offsets)

    @cached_property
    def row_weights(self) -> ArrayT | None:
        """f32 [N], expert-major, when asked for: the weight of each row of `x`, 0 of padding."""
        return self._array(self._raw.row_weights)

    @property
    def raw(self) -> _ferry.Received:
        """Ferry's own tensors by the same names, which speak DLPack and are made at each access."""
        return self._raw

    @property
    def plan(self) -> _ferry.Plan | None:
        """The plan of a dispatch that was given `topk_idx`."""
        return self._raw.plan


class Combined(Result[ArrayT]):
    """What a combine brings. T: this rank's own tokens."""

    _shown = ("x", "topk_weights")
    _raw: _ferry.Combined

    @cached_property
    def x(self) -> ArrayT:
        """[T, H], dtype of the rows: the sum over the ranks that a token went to."""
        return self._array(self._raw.x) if self._out is None else self._out

    @cached_property
    def topk_weights(self) -> ArrayT | None:
        """f32 [T, K] when weights were given: their sum over ranks."""
        return self._array(self._raw.topk_weights)

    @property
    def raw(self) -> _ferry.Combined:
        """As of `Received`."""
        return self._raw
