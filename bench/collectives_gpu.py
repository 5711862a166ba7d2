"""all_reduce of Ferry on GPUs against NCCL, in one run: a process and a GPU for each rank.

    python bench/collectives_gpu.py [--ranks N] [--sms 0 32] [--rounds 15] [--json FILE]

In each round the contenders come in turn. A sample is a CUDA graph of `--chain` calls between two
CUDA events, divided, of the slowest rank; an all-reduce before it aligns the GPUs. Figures are
medians over the rounds; cpu is the CPU time of a replay, divided. NCCL has no NVLink multicast
(NCCL_NVLS_ENABLE=0), as Ferry. Sums are checked before anything is timed.

With `--domain-size N` Ferry takes each N GPUs for a domain, as if what crosses had to go through
CPUs, in calls without a graph; "by the host" copies to the CPU, calls the collectives of the host
there and copies back. NCCL goes by NVLink everywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import collectives
import job

SIZES = [64 << 2 * i for i in range(12)]  # 64 B … 256 MiB


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", "--ranks", type=int, help="one for each GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes", type=int, nargs="*", default=SIZES, help="of a tensor, f32")
    parser.add_argument("--chain", type=int, default=20, help="calls of a graph")
    parser.add_argument("--sms", type=int, nargs="*", default=[0], help="of Ferry; 0: its default")
    parser.add_argument("--domain-size", type=int, default=0, help="GPUs of a domain; 0: all")
    job.add_outputs(parser)
    return parser.parse_args()


class GpuRank(collectives.Rank):
    """The contenders on one rank and its GPU."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import ferry

        self.rank, self.size, self.args = int(os.environ["RANK"]), args.ranks, args
        self.cores = sorted(os.sched_getaffinity(0))
        torch.cuda.set_device(self.rank)
        device = torch.device("cuda", self.rank)
        dist.init_process_group("nccl", device_id=device)
        self.cpu = dist.new_group(backend="gloo")
        boot = ferry.tcp(
            rank=self.rank,
            size=self.size,
            port=int(os.environ["FERRY_PORT"]),
            secret=os.environ["FERRY_SECRET"],
        )
        room = max(args.bytes) + (1 << 20)
        self.ferry = ferry.Collectives(
            boot,
            memory_bytes=room,
            backend="cuda",
            device=self.rank,
            domain_size=args.domain_size,
        )
        if args.domain_size:
            self.host = ferry.Collectives(boot, memory_bytes=room, domain_size=args.domain_size)
            self.staged = self.host.empty((max(args.bytes) // 4,), torch.float32)
        self.ordinary = torch.zeros(max(args.bytes) // 4, device=device)
        self.registered = self.ferry.empty((max(args.bytes) // 4,), torch.float32)
        self.aligned = torch.zeros(1, device=device)

    def meet(self) -> None:
        """Returns when every rank is here."""
        import torch.distributed as dist

        dist.barrier(self.cpu)

    def gather(self, figures: Any) -> Any:
        """A row of each rank."""
        import torch
        import torch.distributed as dist

        every = [torch.empty_like(figures) for _ in range(self.size)]
        dist.all_gather(every, figures, group=self.cpu)
        return torch.stack(every)

    def sample(self, call: Callable[[], object], repeats: int) -> tuple[float, float]:
        """Seconds of a call, and of CPU time."""
        import torch
        import torch.distributed as dist

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # so that the GPU does not wait for what is launched below
        dist.all_reduce(self.aligned)
        cpu = time.process_time()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        used = time.process_time() - cpu
        end.synchronize()
        calls = repeats * self.args.chain
        return begin.elapsed_time(end) / 1e3 / calls, used / calls

    def all_reduce(self, bytes_: int) -> collectives.Calls:
        """In place, f32, of small integers, so that every sum is exact."""
        import torch.distributed as dist

        x, registered = self.ordinary[: bytes_ // 4], self.registered[: bytes_ // 4]
        eager: collectives.Calls = {"nccl": lambda: dist.all_reduce(x)}
        used = {"nccl": x}
        if self.args.domain_size:
            return self.in_domains(eager, used)
        for sms in self.args.sms:
            name = f"ferry, {sms} SMs" if sms else "ferry"
            eager[name] = lambda sms=sms: self.ferry.all_reduce(x, num_sms=sms)
            direct = f"{name}, registered"
            eager[direct] = lambda sms=sms: self.ferry.all_reduce(registered, num_sms=sms)
            used |= {name: x, direct: registered}
        self.check_sums(eager, used)
        return {name: self.chain(call) for name, call in eager.items()}

    def in_domains(self, eager: collectives.Calls, used: dict[str, Any]) -> collectives.Calls:
        """The same without graphs: what crosses is carried by the CPU."""
        x = used["nccl"]
        registered, staged = self.registered[: len(x)], self.staged[: len(x)]

        def by_the_host() -> None:
            staged.copy_(x)
            self.host.all_reduce(staged)
            x.copy_(staged)

        eager |= {
            "by the host": by_the_host,
            "ferry": lambda: self.ferry.all_reduce(x),
            "ferry, registered": lambda: self.ferry.all_reduce(registered),
        }
        self.check_sums(eager, used | dict.fromkeys(eager, x) | {"ferry, registered": registered})
        eager["ferry, e4m3"] = lambda: self.ferry.all_reduce(registered, format="e4m3")

        def repeated(call: Callable[[], object]) -> Callable[[], object]:
            return lambda: [call() for _ in range(self.args.chain)]

        return {name: repeated(call) for name, call in eager.items()}

    def chain(self, call: Callable[[], object]) -> Callable[[], object]:
        """Replays many calls at once."""
        import torch

        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        self.meet()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(self.args.chain):
                call()
        return graph.replay


def launch(args: argparse.Namespace) -> int:
    """Starts the ranks."""
    gpus = job.gpu_count()
    ranks = args.ranks or gpus
    if not 1 <= ranks <= gpus:
        print(
            f"collectives_gpu: got {args.ranks or 'no'} ranks; expected one for each of {gpus} GPUs"
        )
        return 1
    return job.launch(ranks, NCCL_NVLS_ENABLE="0")


def run_rank(args: argparse.Namespace) -> None:
    """What every rank does."""
    import torch

    args.ranks, args.calls = int(os.environ["WORLD_SIZE"]), ["all_reduce"]
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "chain": args.chain,
    }
    collectives.run_rank(args, GpuRank(args), {"nccl": "wall_us"}, **facts)


if __name__ == "__main__":
    parsed = arguments()
    if job.is_rank():
        run_rank(parsed)
    else:
        sys.exit(launch(parsed))
