"""`ferry.torch.record_stream`: which other streams use the memory of results."""

from __future__ import annotations

import torch
from torch import Tensor

from ferry.arguments import instance
from ferry.errors import DestroyedError, InvalidArgumentError
from ferry.handles import groups


def record_stream(tensor: Tensor, stream: torch.cuda.Stream | None = None) -> None:
    """`tensor` is used by work on this stream, too (None: the current one): once it is dropped, its
    memory is not used again before what is on the stream now has ended.

    The same as `tensor.record_stream(stream)`, which knows the memory of Ferry's results, too, but
    for the default and for CPU tensors, for which there is nothing to do. The streams themselves
    are yours to order: `stream.wait_stream(...)`.
    """
    instance("record_stream: tensor", tensor, Tensor, "a torch.Tensor")
    if tensor.device.type != "cuda":
        return
    if stream is None:
        stream = torch.cuda.current_stream(tensor.device)
    instance("record_stream: stream", stream, torch.cuda.Stream, "a torch.cuda.Stream or None")
    if not record_with_group(tensor.data_ptr(), str(tensor.device), stream):
        tensor.record_stream(stream)


def record_with_group(address: int, device: str, stream: torch.cuda.Stream) -> bool:
    """Whether it is memory of a group, which now knows the stream."""
    for group in groups():
        if group.device != device:
            continue
        try:
            group.record_stream(address, stream)
            return True
        except (InvalidArgumentError, DestroyedError):
            # Not this group's memory, or nobody's to look after.
            continue
    return False
