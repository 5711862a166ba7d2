"""Tensors between neighbours of a ring, for `PPBuffer` and `ElasticBuffer.pp_send`."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

import ferry
from deep_ep.arguments import check_memory
from deep_ep.errors import refuse, require, require_integer
from deep_ep.gradients import without_gradients
from deep_ep.groups import Groups
from deep_ep.sizes import SIZE_STEP, TMA_STEP, round_up
from ferry.arguments import shown, whole_number


class Pipeline:
    """Sends return once the tensor is copied; up to `inflight` of them to a neighbour may wait for
    their receives. In CPU memory.

    most: bytes of a tensor.
    """

    def __init__(self, groups: Groups, most: int, inflight: int) -> None:
        call, least = "pp_set_config", "at least 1"
        self._most = require_integer(call, "num_max_tensor_bytes", most, 1, least)
        self._inflight = require_integer(call, "num_max_inflight_tensors", inflight, 1, least)
        self._ranks = groups.collectives(torch.device("cpu"))
        self._size, self._rank = groups.everyone.size, groups.everyone.rank
        self._sent: dict[int, deque[tuple[ferry.Event, Tensor]]] = {}
        self._to_self: deque[Tensor] = deque()
        self._streams: dict[int, ferry.Stream] = {}

    def send(self, call: str, x: Any, dst: int, num_sms: int | None) -> None:
        """A copy of x leaves; with `inflight` copies on their way it waits for the oldest."""
        to = self._check(call, x, dst, num_sms)
        if to == self._rank:
            require(len(self._to_self) < self._inflight, call, "x", "no room", "a receive first")
            self._to_self.append(x.clone())
            return
        under_way = self._sent.setdefault(to, deque())
        while under_way and under_way[0][0].ready():
            under_way.popleft()
        if len(under_way) >= self._inflight:
            under_way.popleft()[0].wait()
        copy = x.clone()
        stream = self._streams.setdefault(to, ferry.Stream())
        event = self._ranks.send(copy.view(-1).view(torch.uint8), to, stream=stream)
        under_way.append((event, copy))

    def recv(self, call: str, x: Any, src: int, num_sms: int | None) -> None:
        """Waits for the neighbour's next tensor, of as many bytes."""
        source = self._check(call, x, src, num_sms)
        lazy = x.is_neg() or x.is_conj()
        require(not lazy, call, "x", "a lazy view, negated or conjugated", "one of plain memory")
        if source == self._rank:
            require(len(self._to_self) > 0, call, "x", "nothing was sent", "a send first")
            sent = self._to_self[0].view(-1).view(torch.uint8)
            got, least = f"{x.nbytes} bytes", f"{sent.numel()}, as of the next tensor"
            require(x.nbytes == sent.numel(), call, "x", got, least)
            x.view(-1).view(torch.uint8).copy_(sent)
            self._to_self.popleft()
            return
        self._ranks.recv(x.view(-1).view(torch.uint8), source)

    def flush(self) -> None:
        """Waits until every tensor that was sent is received."""
        for under_way in self._sent.values():
            while under_way:
                under_way.popleft()[0].wait()

    def _check(self, call: str, x: Any, peer: int, num_sms: int | None) -> int:
        """The other rank, as a plain number: that of a tensor would be another key each time."""
        good = isinstance(x, Tensor) and x.device.type == "cpu" and x.is_contiguous()
        got = f"a tensor of {x.device}" if isinstance(x, Tensor) else type(x).__name__
        require(
            good, call, "x", got, "a dense tensor in CPU memory: GPUs send none to each other yet"
        )
        check_memory(call, x=x)
        size = x.numel() * x.element_size()
        require(0 < size <= self._most, call, "x", f"{size} bytes", f"1 to {self._most}")
        near = {(self._rank + 1) % self._size, (self._rank - 1) % self._size}
        expected = f"a neighbour in the ring: {sorted(near)}"
        rank = whole_number(peer)
        if rank not in near:
            refuse(call, "the other rank", shown(peer), expected)
        require(
            num_sms is None or whole_number(num_sms) == 0,
            call,
            "num_sms",
            num_sms,
            "0: CPU memory takes no SMs",
        )
        return rank


class PipelineCalls:
    """`pp_*` of an ElasticBuffer."""

    _groups: Groups
    _pipeline: Pipeline | None = None

    def _require_living(self) -> None:
        raise NotImplementedError

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes of all tensors that may be on their way, in and out, to both neighbours."""
        call, least = "get_pp_buffer_size_hint", "0 or more"
        size = require_integer(call, "num_max_tensor_bytes", num_max_tensor_bytes, 0, least)
        name = "num_max_inflight_tensors"
        count = require_integer(call, name, num_max_inflight_tensors, 0, least)
        return round_up(4 * count * round_up(size, TMA_STEP), SIZE_STEP)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Collective. The most bytes of a tensor, and how many to a neighbour may wait for their
        receives. What was sent before is received first."""
        self._require_living()
        if self._pipeline is not None:
            self._pipeline.flush()
        self._pipeline = Pipeline(self._groups, num_max_tensor_bytes, num_max_inflight_tensors)
        self._groups.everyone.barrier()

    @without_gradients
    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """A copy of t, in CPU memory, leaves for the previous or the next rank of the ring."""
        self._configured("pp_send").send("pp_send", t, dst_rank_idx, num_sms)

    @without_gradients
    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Overwrites t with the next tensor of that rank, of as many bytes."""
        self._configured("pp_recv").recv("pp_recv", t, src_rank_idx, num_sms)

    def _configured(self, call: str) -> Pipeline:
        self._require_living()
        if self._pipeline is None:
            refuse(call, "sizes", "none", "pp_set_config before it")
        return self._pipeline
