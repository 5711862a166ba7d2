"""Where the tensors of a call lie and what it runs on: the CPU and a worker, a GPU and a stream."""

from __future__ import annotations

from ferry import _ferry
from ferry.arguments import describe, integer, loaded, refuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HANDLE_MAX = 2**64 - 1
_MOST_STREAMS = 64
_HOST_STREAM = "a ferry.Stream or None, because this group runs on the host engine"


class Place:
    """What one call of a group says about memory and order."""

    __slots__ = ("finish", "gpu", "handle", "ordered", "stream")

    def __init__(
        self,
        gpu: int | None = None,
        stream: _ferry.Stream | None = None,
        handle: int = 0,
        ordered: bool = False,
        finish: bool = False,
    ) -> None:
        self.gpu = gpu  # that holds the tensors; None: CPU memory
        self.stream = stream  # that the call runs on; None: returns when it is done
        self.handle = handle  # of a CUDA stream
        self.ordered = ordered  # torch gives memory back in the order of this very stream
        self.finish = finish  # the caller gave no stream and gets finished results

    @property
    def words(self) -> str:
        """The device in messages."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu}"

    def finished(self, raw: Any) -> Any:
        """The result of the call; waits for it when the caller gave no stream."""
        if self.finish:
            raw.event.wait()
        return raw


CPU = Place()


class Streams:
    """The streams of one group: makes a `Place` of what a caller gives as `stream`."""

    def __init__(self, gpu: int | None) -> None:
        self._gpu = gpu
        self._known: dict[int, _ferry.Stream] = {}

    def place(self, call: str, stream: Any, main: Any) -> Place:
        """Of a call whose main tensor is `main`.

        Without a stream on a GPU: torch's current stream for torch tensors; for others the default
        stream, and finished results.
        """
        if self._gpu is None:
            if stream is None:
                return CPU
            if not isinstance(stream, _ferry.Stream):
                refuse(f"{call}: stream", describe(stream), _HOST_STREAM)
            return Place(stream=stream)
        current = current_handle(self._gpu)
        if stream is None:
            torch = loaded("torch")
            if current is None or not isinstance(main, torch.Tensor):  # type: ignore[union-attr]
                return Place(self._gpu, self.of(0), 0, False, True)
            return Place(self._gpu, self.of(current), current, True)
        raw, handle = self.given(call, stream)
        return Place(self._gpu, raw, handle, handle == current)

    def given(self, call: str, stream: Any) -> tuple[_ferry.Stream, int]:
        """A caller's stream of a group on a GPU, and its handle."""
        if isinstance(stream, _ferry.Stream):
            handle = stream.cuda_stream
            if handle is not None:
                return stream, handle  # the engine checks its device
            refuse(
                f"{call}: stream",
                "a ferry.Stream with a worker thread",
                f"a CUDA stream of cuda:{self._gpu}, or None",
            )
        handle = stream_handle(f"{call}: stream", stream, self._gpu)
        return self.of(handle), handle

    def of(self, handle: int) -> _ferry.Stream:
        """The CUDA stream with this handle."""
        found = self._known.get(handle)
        if found is None:
            assert self._gpu is not None
            found = _ferry.Stream.of_cuda(handle, self._gpu)
            while len(self._known) >= _MOST_STREAMS:
                self._known.pop(next(iter(self._known)), None)
            self._known[handle] = found
        return found


def stream_handle(name: str, stream: Any, gpu: int | None) -> int:
    """The cudaStream_t of a torch.cuda.Stream, an integer, or what has `__cuda_stream__`."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return integer(name, stream, 0, HANDLE_MAX)
    handle = getattr(stream, "cuda_stream", None)  # torch.cuda.Stream
    if isinstance(handle, int):
        device = getattr(getattr(stream, "device", None), "index", gpu)
        if device != gpu:
            refuse(name, f"a stream of cuda:{device}", f"one of cuda:{gpu}, the GPU of this rank")
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        return integer(name, protocol()[1], 0, HANDLE_MAX)
    return refuse(
        name,
        describe(stream),
        "a torch.cuda.Stream, a cudaStream_t as an integer, a ferry.Stream, or None",
    )


def current_handle(gpu: int) -> int | None:
    """Of torch's current stream on that GPU; None when torch is not there."""
    torch = loaded("torch")
    if torch is None:
        return None
    return int(torch.cuda.current_stream(gpu).cuda_stream)


def device_name(gpu: int | None) -> str:
    """As torch names it: "cpu" for None, "cuda:0", ..."""
    return "cpu" if gpu is None else f"cuda:{gpu}"


def chosen_gpu(device: Any) -> int:
    """An ordinal from an integer, "cuda:1", a torch.device; None: torch's current one, or -1, the
    current one of the CUDA runtime."""
    torch = loaded("torch")
    if device is None:
        ready = torch is not None and torch.cuda.is_available()
        return int(torch.cuda.current_device()) if ready else -1  # type: ignore[union-attr]
    text = device if isinstance(device, str) else None
    if torch is not None and isinstance(device, torch.device):
        text = str(device)
    if text is None:
        return integer("Group: device", device, 0, 1 << 16)
    kind, _, number = text.partition(":")
    if kind != "cuda" or not (number.isdecimal() or text == "cuda"):
        refuse("Group: device", describe(device), 'an ordinal, "cuda" or "cuda:0"')
    return int(number) if number else chosen_gpu(None)
