"""`PPBuffer` of DeepEP V2.5."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deep_ep.buffers.base import BufferBase
from deep_ep.errors import require_seconds
from deep_ep.gradients import without_gradients
from deep_ep.pipeline import Pipeline


class PPBuffer(BufferBase):
    """Tensors between the stages of a pipeline, in CPU memory: those of GPUs are refused.

    Args:
        group: a process group of torch.distributed, or a communicator of mpi4py; a ring.
        num_max_tensor_bytes: the most bytes of a tensor.
        num_max_inflight_tensors: how many to a neighbour may wait for their receives.
        sl_idx: None, or a service level, which is not set: as of an `ElasticBuffer`.
        num_gpu_timeout_secs: bounds every wait, unless FERRY_DEADLINE does.
    """

    def __init__(
        self,
        group: Any,
        num_max_tensor_bytes: int,
        num_max_inflight_tensors: int,
        sl_idx: int | None = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(explicitly_destroy)
        seconds = num_gpu_timeout_secs
        require_seconds("PPBuffer", "num_gpu_timeout_secs", seconds)
        self._meet(group, deadline=seconds, sl_idx=sl_idx)
        self._pipeline = Pipeline(self._groups, num_max_tensor_bytes, num_max_inflight_tensors)

    @without_gradients
    def send(self, x: Tensor, dst_rank_idx: int, num_sms: int | None = None) -> None:
        """A copy of x leaves for the previous or the next rank of the ring. Waits only where
        num_max_inflight_tensors are on their way there. num_sms: None or 0."""
        self._require_living()
        self._pipeline.send("send", x, dst_rank_idx, num_sms)

    @without_gradients
    def recv(self, x: Tensor, src_rank_idx: int, num_sms: int | None = None) -> None:
        """Overwrites x with the next tensor of that rank, of as many bytes."""
        self._require_living()
        self._pipeline.recv("recv", x, src_rank_idx, num_sms)
