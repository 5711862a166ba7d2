"""What test_mpi.py starts on every rank: both modes over the communicator of all ranks, then over
halves of it with the ranks in the other order."""

from __future__ import annotations

import sys
from pathlib import Path

from mpi4py import MPI

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

import low_latency_calls  # noqa: E402  found by the line above
import throughput_bodies  # noqa: E402
import torch  # noqa: E402

import deep_ep  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    everyone = MPI.COMM_WORLD
    half = everyone.Split(everyone.Get_rank() % 2, -everyone.Get_rank())
    for comm in (everyone, half):
        buffer = deep_ep.Buffer(
            None, 1 << 20, low_latency_mode=True, comm=comm, explicitly_destroy=True
        )
        assert buffer.group is comm
        assert (buffer.rank, buffer.group_size) == (comm.Get_rank(), comm.Get_size())
        throughput_bodies.changing_experts(buffer, "cpu")
        low_latency_calls.every_format_and_end(buffer, "cpu")
        buffer.destroy()
    served = everyone.gather(everyone.Get_rank())
    if served is not None:  # on rank 0, as lines of several would mix
        print("served", *served)


main()
