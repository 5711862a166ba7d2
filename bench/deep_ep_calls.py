"""What `deep_ep` costs beside Ferry's own calls: CPU time of a call, and logical GB/s.

    ferry run -n 1 -- python bench/deep_ep_calls.py
    ferry run -n 4 -- python bench/deep_ep_calls.py --device cuda --tokens 4096 --hidden 7168 \\
        --topk 8 --experts 256

Throughput and low-latency calls: through `deep_ep.Buffer`, `ElasticBuffer` (V2) and `EPBuffer`
(V2.5), and of the group behind it or an exchange like that behind it, in short rounds in turn, in
one run; of Ferry's results those that deep_ep's call returns, as tensors.
Figures are medians over rounds, in brackets that of the differences of neighbouring rounds. CPU
time is of the calling thread. The time of a call is a round divided by its calls; on GPUs a round
ends with a synchronisation. A low-latency combine is timed alone, behind a dispatch of its own that
is not: who drops what the dispatch left, and when, is no part of it. The GB/s count the rows
received, beside them the share of Ferry's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import job
import torch

import deep_ep
import ferry


@dataclasses.dataclass
class Call:
    """What is timed, and what comes before it each time and is not."""

    call: Callable[[], Any]
    before: Callable[[], Any] | None = None


class Comm:
    """An mpi4py communicator, as far as a Buffer needs one, of a bootstrap."""

    def __init__(self, bootstrap: ferry.Bootstrap) -> None:
        self.bootstrap = bootstrap

    def Get_rank(self) -> int:  # noqa: N802
        return self.bootstrap.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.bootstrap.size

    def allgather(self, thing: Any) -> list[Any]:
        return [pickle.loads(one) for one in self.bootstrap.all_gather(pickle.dumps(thing))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, default=8, help="of each rank")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--decode-tokens", type=int, default=8, help="of low-latency calls")
    parser.add_argument("--sms", type=int, default=24)
    parser.add_argument("--calls", type=int, default=100, help="in a round")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="calls whose name holds this")
    job.add_outputs(parser)
    return parser.parse_args()


def pairs(args: argparse.Namespace, buffer: Any) -> dict[str, tuple[Call, Call, int]]:
    """By name: a call of Ferry's, the same through deep_ep, the bytes that it moves."""
    torch.manual_seed(buffer.rank)
    x = torch.randn(args.tokens, args.hidden, device=args.device).bfloat16()
    scores = torch.rand(args.tokens, args.experts, device=args.device)
    weights, idx = scores.softmax(1).topk(args.topk)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, args.experts)
    config = deep_ep.Config(args.sms, 6, 256)
    rows, _, _, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=weights,
        config=config,
    )
    group, plan, sms = handle.exchange.group, handle.exchange.plan, args.sms
    few, few_idx, few_weights = (t[: args.decode_tokens] for t in (x, idx, weights))
    capacity = args.decode_tokens
    exchange = ferry.LatencyExchange(
        group, capacity=capacity, hidden=args.hidden, topk=args.topk, dtype="bf16"
    )
    own = exchange.dispatch(few, few_idx, format="e4m3")
    sent = buffer.low_latency_dispatch(few, few_idx, capacity, args.experts)
    answer = torch.zeros(own.x.shape, dtype=torch.bfloat16, device=args.device)
    sums: Any = None

    def latency_dispatch() -> None:
        nonlocal own
        own = exchange.dispatch(few, few_idx, format="e4m3")
        _ = own.x, own.scales, own.counts, own.source_token, own.ranges

    def low_latency_dispatch() -> None:
        nonlocal sent
        sent = buffer.low_latency_dispatch(few, few_idx, capacity, args.experts)

    def latency_combine() -> None:
        nonlocal sums
        sums = exchange.combine(answer, own, few_weights).x

    def low_latency_combine() -> None:
        nonlocal sums
        sums = buffer.low_latency_combine(answer, few_idx, few_weights, sent[2])

    return {
        "dispatch, cached": (
            Call(lambda: group.dispatch(x, plan, num_sms=sms).x),
            Call(lambda: buffer.dispatch(x, handle=handle, config=config)),
            rows.numel() * 2,
        ),
        "combine": (
            Call(lambda: group.combine(rows, plan, num_sms=sms).x),
            Call(lambda: buffer.combine(rows, handle, config=config)),
            rows.numel() * 2,
        ),
        "low-latency dispatch": (Call(latency_dispatch), Call(low_latency_dispatch), 0),
        "low-latency combine": (
            Call(latency_combine, before=latency_dispatch),
            Call(low_latency_combine, before=low_latency_dispatch),
            0,
        ),
    }


def later_pairs(args: argparse.Namespace, comm: Comm) -> dict[str, tuple[Call, Call, int]]:
    """The same of V2 and V2.5: new routes, cached ones, combines; rank-major and expert-major."""
    torch.manual_seed(comm.Get_rank())
    x = torch.randn(args.tokens, args.hidden, device=args.device).bfloat16()
    scores = torch.rand(args.tokens, args.experts, device=args.device)
    weights, idx = scores.softmax(1).topk(args.topk)
    found: dict[str, tuple[Call, Call, int]] = {}
    for kind, name in ((deep_ep.ElasticBuffer, "V2"), (deep_ep.EPBuffer, "V2.5")):
        buffer = kind(comm, num_max_tokens_per_rank=args.tokens)
        for expand in (False, True):
            new = {
                "topk_idx": idx,
                "topk_weights": weights,
                "num_experts": args.experts,
                "num_sms": args.sms,
                "do_expand": expand,
            }
            rows, _, _, handle, _ = buffer.dispatch(x, **new)
            exchange, size = handle._exchange, rows.numel() * 2
            group, plan = exchange.group, exchange.plan
            how = {"num_sms": args.sms, "order": "expert_major" if expand else "rank_major"}
            again = {"handle": handle, "num_sms": args.sms, "do_expand": expand}

            new_how = how | {"row_weights": expand}

            def ferrys(group: Any = group, new_how: Any = new_how, expand: bool = expand) -> Any:
                made = group.dispatch(x, topk_idx=idx, topk_weights=weights, **new_how)
                if expand:
                    return made.x, made.row_weights
                return made.x, made.topk_idx, made.topk_weights

            def along(
                group: Any = group, plan: Any = plan, how: Any = how, expand: bool = expand
            ) -> Any:
                made = group.dispatch(x, plan, **how)
                return (made.x,) if expand else (made.x, made.topk_idx)

            title = f"{name} {'expanded ' if expand else ''}"
            found[f"{title}dispatch"] = (
                Call(ferrys),
                Call(lambda buffer=buffer, new=new: buffer.dispatch(x, **new)),
                size,
            )
            found[f"{title}dispatch, cached"] = (
                Call(along),
                Call(lambda buffer=buffer, again=again: buffer.dispatch(x, **again)),
                size,
            )
            found[f"{title}combine"] = (
                Call(
                    lambda group=group, plan=plan, how=how, r=rows: group.combine(r, plan, **how).x
                ),
                Call(lambda buffer=buffer, handle=handle, r=rows: buffer.combine(r, handle)),
                size,
            )
    return found


def timed(args: argparse.Namespace, what: Call) -> tuple[float, float]:
    """Seconds of a call, and CPU seconds of this thread. With something before it: until it
    returns, and with what two readings of the clocks take."""
    if what.before:
        return timed_alone(args, what.before, what.call)
    what.call()
    if args.device == "cuda":
        torch.cuda.synchronize()
    start, cpu = time.perf_counter(), time.thread_time()
    for _ in range(args.calls):
        what.call()
    cpu = time.thread_time() - cpu
    if args.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / args.calls, cpu / args.calls


def timed_alone(
    args: argparse.Namespace, before: Callable[[], Any], call: Callable[[], Any]
) -> tuple[float, float]:
    seconds = cpu_seconds = 0.0
    for _ in range(args.calls):
        before()
        start, cpu = time.perf_counter(), time.thread_time()
        call()
        cpu_seconds += time.thread_time() - cpu
        seconds += time.perf_counter() - start
    if args.device == "cuda":
        torch.cuda.synchronize()
    return seconds / args.calls, cpu_seconds / args.calls


def measured(
    args: argparse.Namespace, comm: Comm, ferrys: Call, through: Call
) -> list[list[tuple[float, float]]]:
    """`timed` of both, round by round; every other round the other one is first."""
    samples: list[list[tuple[float, float]]] = [[], []]
    for round_ in range(args.rounds):
        for which in (0, 1) if round_ % 2 else (1, 0):
            comm.allgather(None)
            samples[which].append(timed(args, (ferrys, through)[which]))
    return samples


def figures_of(samples: list[list[tuple[float, float]]], size: int) -> dict[str, float]:
    """Microseconds of a call and of its CPU time."""
    (own, own_cpu), (all_, all_cpu) = (
        [statistics.median(column) * 1e6 for column in zip(*kept)] for kept in samples
    )
    more = statistics.median((b[1] - a[1]) * 1e6 for a, b in zip(*samples))
    return {
        "ferry_us": own,
        "deep_ep_us": all_,
        "ferry_cpu_us": own_cpu,
        "deep_ep_cpu_us": all_cpu,
        "more_cpu_us": more,
        "bytes": size,
    }


def words_of(name: str, f: dict[str, float]) -> str:
    rate = ""
    if f["bytes"]:
        own, all_ = (f["bytes"] / f[which] / 1e3 for which in ("ferry_us", "deep_ep_us"))
        rate = f", {own:.3g} and {all_:.3g} GB/s: {100 * all_ / own:.1f} %"
    return (
        f"{name}: Ferry {f['ferry_us']:.1f} µs, CPU {f['ferry_cpu_us']:.1f}; deep_ep "
        f"{f['deep_ep_us']:.1f} µs, CPU {f['deep_ep_cpu_us']:.1f} ({f['more_cpu_us']:+.1f}){rate}"
    )


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    boot = job.bootstrap(ranks=1)
    if args.device == "cuda":
        torch.cuda.set_device(boot.rank % torch.cuda.device_count())
    comm = Comm(boot)
    buffer = deep_ep.Buffer(None, 1 << 30, comm=comm, low_latency_mode=True)
    figures: dict[str, dict[str, float]] = {}
    every = pairs(args, buffer) | later_pairs(args, comm)
    for name, (ferrys, through, size) in job.shown(every.items(), "calls"):
        if args.only in name:
            figures[name] = figures_of(measured(args, comm, ferrys, through), size)
    if boot.rank == 0:
        for name, found in figures.items():
            print(words_of(name, found))
        job.write(args, job.settings_of(args, boot.size) | {"figures": figures})
    comm.allgather(None)


if __name__ == "__main__":
    main()
