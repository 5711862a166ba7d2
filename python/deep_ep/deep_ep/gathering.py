"""Sessions of all-gathers in registered memory: `agrs_*` and `all_gather` of an `ElasticBuffer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deep_ep.arguments import carried_rows, check_dtype, check_memory, is_strided, shapes_of, words
from deep_ep.errors import refuse, require, require_flags, require_integer
from deep_ep.gradients import without_gradients
from deep_ep.groups import Groups
from deep_ep.sizes import SIZE_STEP, TMA_STEP, ranks_of, round_up


class Gathering:
    """Of an ElasticBuffer. A session's results lie in one piece of memory, from its beginning: the
    next session writes over them."""

    _groups: Groups
    num_ranks: int
    rank_idx: int
    _agrs: _Session | None = None

    def _require_living(self) -> None:
        raise NotImplementedError

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Any, dtype: torch.dtype) -> int:
        """Of the results of a session in which tensors of these shapes, or of this one, are
        gathered."""
        call = "get_agrs_num_max_session_bytes"
        check_dtype(call, dtype)
        ranks = ranks_of(call, group)
        each = (math.prod(shape) * dtype.itemsize for shape in shapes_of(call, shapes)[0])
        return sum(round_up(ranks * one, TMA_STEP) for one in each)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """The same, rounded up to 2 MiB."""
        call, name = "get_agrs_buffer_size_hint", "num_max_session_bytes"
        return round_up(
            require_integer(call, name, num_max_session_bytes, 0, "0 or more"), SIZE_STEP
        )

    def agrs_set_config(
        self, num_max_session_bytes: int, num_max_all_gathers_per_session: int
    ) -> None:
        """Collective. What a session may take. The memory lies on the GPU once torch has used one,
        else in CPU memory."""
        self._require_living()
        call = "agrs_set_config"
        size = require_integer(call, "num_max_session_bytes", num_max_session_bytes, 1, "1 or more")
        name = "num_max_all_gathers_per_session"
        calls = require_integer(call, name, num_max_all_gathers_per_session, 1, "1 or more")
        self._agrs = _Session(self._groups, size, calls)
        self._groups.everyone.barrier()

    def create_agrs_session(self) -> None:
        """Begins a session."""
        session = self._session("create_agrs_session")
        require(not session.open, "create_agrs_session", "session", "open", "one at a time")
        session.open, session.bytes, session.calls = True, 0, 0

    def destroy_agrs_session(self) -> None:
        """Collective. Ends it, when all ranks are done with it."""
        session = self._session("destroy_agrs_session")
        require(session.open, "destroy_agrs_session", "session", "none", "an open one")
        session.open = False
        if session.storage.is_cuda:
            torch.cuda.current_stream().synchronize()
        session.ranks.barrier()

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """Both, around a `with` block; not enabled: neither."""
        require_flags("agrs_new_session", enabled=enabled)
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        finally:
            self.destroy_agrs_session()

    def agrs_get_inplace_tensor(
        self, shapes: Any, dtype: torch.dtype
    ) -> Tensor | tuple[Tensor, ...]:
        """This rank's part of a result, for a shape, or of several, to be filled and gathered
        without a copy."""
        call = "agrs_get_inplace_tensor"
        check_dtype(call, dtype)
        given, several = shapes_of(call, shapes)
        made = tuple(
            self._session(call).room(call, self.num_ranks, shape, dtype)[self.rank_idx]
            for shape in given
        )
        return made if several else made[0]

    @without_gradients
    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Collective, in a session: [R, ...] of each tensor, and a function that waits for them."""
        call = "all_gather"
        session = self._session(call)
        require(session.open, call, "session", "none", "an open one")
        several: list[Any] = list(t) if isinstance(t, (list, tuple)) else [t]
        for one in several:
            require(is_strided(one), call, "t", words(one), "a strided tensor, or a list of them")
            check_memory(call, t=one)
        session.calls += 1
        most = session.most_calls
        require(session.calls <= most, call, "session", f"{session.calls} calls", f"{most} at most")
        made = [session.gather(call, self.num_ranks, self.rank_idx, one) for one in several]

        def handle() -> None:
            """Calls stand on the current stream: there is nothing left to wait for."""

        found: tuple[Callable[[], None] | Tensor, ...] = (*made, handle)
        return found

    def _session(self, call: str) -> _Session:
        self._require_living()
        if self._agrs is None:
            refuse(call, "session", "no sizes", "agrs_set_config before it")
        return self._agrs


class _Session:
    """The memory, and how much of it is used."""

    def __init__(self, groups: Groups, size: int, calls: int) -> None:
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        self.ranks = groups.collectives(device)
        self.storage = torch.zeros(round_up(size, TMA_STEP), dtype=torch.uint8, device=device)
        self.most_calls = calls
        self.open, self.bytes, self.calls = False, 0, 0

    def room(self, call: str, ranks: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        require(self.open, call, "session", "none", "an open one")
        size = ranks * math.prod(shape) * dtype.itemsize
        left = self.storage.numel() - self.bytes
        require(size <= left, call, "session", f"{left} bytes that are left", f"{size}")
        part = self.storage[self.bytes : self.bytes + size]
        self.bytes += round_up(size, TMA_STEP)
        return part.view(dtype).view(ranks, *shape)

    def gather(self, call: str, ranks: int, rank: int, one: Tensor) -> Tensor:
        good = one.is_contiguous() and one.device == self.storage.device
        got = f"a tensor of {one.device}, strides {one.stride()}"
        require(good, call, "t", got, f"a dense tensor of {self.storage.device}")
        bytes_of_one = one.numel() * one.element_size()
        begin = one.data_ptr() - self.storage.data_ptr()
        if 0 <= begin < self.storage.numel():
            first = begin - rank * bytes_of_one
            good = 0 <= first <= self.storage.numel() - ranks * bytes_of_one
            require(good, call, "t", "another part", "one of agrs_get_inplace_tensor")
            part = self.storage[first : first + ranks * bytes_of_one]
            whole = part.view(one.dtype).view(ranks, *one.shape)
        else:
            whole = self.room(call, ranks, one.shape, one.dtype)
        sent = carried_rows(one.view(-1))
        self.ranks.all_gather(sent, whole.view(-1).view(sent.dtype))
        return whole
