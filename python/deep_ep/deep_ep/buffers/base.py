"""What the buffers of all releases share: how their ranks meet, and how one leaves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

import ferry
import ferry.torch
from deep_ep.elastic_group import ElasticGroup
from deep_ep.environment import shows_buffers
from deep_ep.errors import (
    absent,
    refuse,
    refuse_destroyed,
    require_flags,
    require_integer,
    warn_once,
)
from deep_ep.event import EventHandle
from deep_ep.groups import Groups
from deep_ep.runtime import Runtime


class BufferBase:
    """A rank's side of some ranks that exchange tensors.

    explicitly_destroy: `destroy` will be called; else the last reference to go does it.
    """

    group: Any
    _groups: Groups
    _regroups = False

    def __init__(self, explicitly_destroy: bool = False) -> None:
        self.runtime: Any = None
        require_flags(type(self).__name__, explicitly_destroy=explicitly_destroy)
        self.explicitly_destroy = explicitly_destroy

    @property
    def main_context(self) -> Any:
        """Who this rank is among the others; None once destroyed."""
        return self.runtime

    @property
    def context(self) -> Any:
        """The same."""
        return self.runtime

    def print_memory_usage(self) -> None:
        """Prints the bytes that Ferry holds for this buffer on this rank."""
        self._require_living()
        bytes_held = self._groups.memory_bytes()
        print(f"deep_ep: rank {self._groups.everyone.rank}: {bytes_held} bytes", flush=True)

    def destroy(self) -> None:
        """Leave. Needs explicitly_destroy. It waits for no peer: every rank may come to it when it
        is done with its own calls, and results stay valid until they are dropped."""
        assert self.explicitly_destroy, (
            f"destroy: this {type(self).__name__} was made without explicitly_destroy=True; "
            "expected it, or to drop the last reference instead"
        )
        if self.runtime is None:
            return
        runtime, self.runtime = self.runtime, None
        self._close()
        self._groups.destroy()
        runtime.destroy()

    def _meet(
        self,
        group: Any,
        comm: Any = None,
        *,
        memory_bytes: int = 0,
        nvl_bytes: int = 0,
        rdma_bytes: int = 0,
        deadline: float | None = None,
        crossing: str = "automatic",
        sl_idx: int | None = None,
    ) -> None:
        """Collective: the constructor's share. group, comm: as of `bootstrap_of`, used here and not
        after. The bytes: as of `Groups` and of a `Runtime`. sl_idx: a service level, other than the
        default."""
        call = type(self).__name__
        if sl_idx is not None:
            require_integer(call, "sl_idx", sl_idx, 0, "0 or more, or None")
        goes_on = self._regroups and isinstance(group, ElasticGroup)
        meeting = group if goes_on else bootstrap_of(call, group, comm)
        self.group = group if group is not None else comm
        self._groups = Groups(meeting, memory_bytes, deadline, crossing)
        everyone = self._groups.everyone
        self.runtime = Runtime(everyone, nvl_bytes, rdma_bytes)
        if sl_idx is not None and everyone.domains > 1:
            instead = "the service level is what libfabric's provider takes by itself"
            warn_once(call, "sl_idx", sl_idx, instead)
        if shows_buffers():
            domains = f"{everyone.domains} domains, {everyone.fabric_name}"
            held = f"{self._groups.memory_bytes()} bytes registered"
            print(f"deep_ep: rank {everyone.rank} of {everyone.size}: {call}: {domains}, {held}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise absent(type(self).__name__, name)

    def _close(self) -> None:
        """Drops what holds the groups' memory, before they are left."""

    def _require_living(self) -> None:
        if self.runtime is None:
            refuse_destroyed()

    def _group_for(self, num_experts: int, device: torch.device) -> ferry.Group:
        """The group of Ferry with that many experts whose tensors lie there. Collective when it is
        new; the same object after."""
        self._require_living()
        return self._groups.of(num_experts, device)

    def __del__(self) -> None:
        # Groups are left with their last user: callers that make a larger buffer and drop this one
        # still have handles, which keep the group that they belong to.
        if getattr(self, "runtime", None) is not None and self.explicitly_destroy:
            print(
                f"deep_ep: rank {self._groups.everyone.rank}: {type(self).__name__} made with "
                "explicitly_destroy=True was dropped without destroy()",
                file=sys.stderr,
            )


class Regroups(BufferBase):
    """Of the buffers that ranks go on with when one is lost, and when a process takes its place."""

    _regroups = True

    def regroup(self) -> list[int]:
        """Not in the original. Collective among the ranks that are left, after a call raised
        ferry.PeerFailedError, PeerLeftError or DeadlineExceededError: this buffer goes on without
        the others. With an `ElasticGroup` processes that wait take their places: all ranks call it
        when `commit` has returned True. Returns the ranks that are there.

        Ranks and experts keep their numbers; routes to experts of lost ranks are refused, and so
        are handles from before. Low-latency calls go on among the ranks that are there. What takes
        all ranks (gathers, pipelines, tables of Engram) is configured anew, and raises
        ferry.UnsupportedError while one is lost. Raises as `ferry.Group.regroup` does.
        """
        self._require_living()
        return self._groups.regroup(self._reopen)

    def commit(self, step: int) -> bool:
        """Not in the original. Collective. Returns when all ranks have called it with this step, 1
        or more and more than before; after a loss `view().step` says which one has returned on any
        rank. True, on all ranks alike, while a process waits for the place of a lost rank."""
        self._require_living()
        return self._groups.everyone.commit(step)

    def view(self) -> ferry.GroupView:
        """Not in the original. Who is there, who is lost, the step that was committed last, and
        which ranks have joined since. Not collective."""
        self._require_living()
        return self._groups.everyone.view()

    def _reopen(self) -> None:
        """Collective at the end of `regroup`: drops and makes anew what belongs to some ranks."""


class Communicating(BufferBase):
    """The calls that the buffers of V2 and V2.5 have in common, beside their exchanges."""

    @staticmethod
    def capture() -> EventHandle:
        """The point that the current stream has reached."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The torch.cuda.Stream that asynchronous exchanges run on."""
        self._require_living()
        return self.runtime.get_comm_stream()

    def _barrier(self, use_comm_stream: bool, with_cpu_sync: bool) -> None:
        """Collective: what ranks had asked for before is done on all of them."""
        self._require_living()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if with_cpu_sync:
                torch.cuda.synchronize()
            else:
                torch.cuda.current_stream().synchronize()
                if use_comm_stream:
                    self.get_comm_stream().synchronize()
        self._groups.everyone.barrier()


def bootstrap_of(call: str, group: Any, comm: Any = None) -> ferry.Bootstrap:
    """How the ranks meet. group: a process group of torch.distributed, or what has Get_rank,
    Get_size and allgather as mpi4py has them, which comm is, too."""
    if group is None and comm is None:
        raise ValueError(
            f"{call}: got neither group nor comm; expected a process group of torch.distributed, "
            "or a communicator of mpi4py"
        )
    if isinstance(group, ElasticGroup):
        expected = "a process group, or a communicator of mpi4py: only what has regroup takes it"
        refuse(call, "group", "an ElasticGroup", expected)
    if isinstance(group, ferry.Bootstrap):
        expected = "a process group, a communicator of mpi4py, or ElasticGroup(bootstrap, name)"
        refuse(call, "group", "a ferry.Bootstrap", expected)
    if group is None or hasattr(group, "Get_rank"):
        return ferry.from_mpi(comm if group is None else group)
    return ferry.torch.from_process_group(group)
