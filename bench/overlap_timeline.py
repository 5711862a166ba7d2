"""How well exchanges and matrix products share the GPUs: a timeline, and what each costs the other.

    python bench/overlap_timeline.py [--ranks N] [--sms 16] [--json FILE] [--plot FILE]

One process a GPU, started by this file. On one stream a chain of bf16 matrix products, each large
enough to fill the GPU; on another one, of high priority, dispatch and combine in turn on `--sms`
SMs (cached plan, rank-major, combine from the received rows). Measured:

- alone: the products, then the exchanges,
- together: both streams begin at the same moment,
- together, products on the other SMs: cuBLAS is told to leave `--sms` SMs free (where torch can
  tell it), as a training step would set it up.

Every product and every exchange lies between two CUDA events; a stream's time is from the common
begin, at which the GPUs of all ranks are aligned by a small dispatch, to its last event. Of
`--iterations` runs the one with the median time is shown; of the ranks the slowest one counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import job
from plot_pages import timeline

ALONE_PRODUCTS, ALONE_EXCHANGES = "products alone", "exchanges alone"
TOGETHER, CARVED_ALONE, CARVED = "together", "products alone, fewer SMs", "together, own SMs"
ALIGN_HIDDEN = 128
CYCLES_A_MS = 2_000_000  # at most: H200 runs at 1.98 GHz


def arguments() -> argparse.Namespace:
    """The command line, the same in the launcher and in every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-n", "--ranks", type=int, default=0, help="0: one for each GPU")
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--sms", type=int, default=16, help="that move rows")
    parser.add_argument("--products", type=int, default=12, help="in the chain")
    parser.add_argument("--product-rows", type=int, default=4096, help="of a product's left matrix")
    parser.add_argument("--exchanges", type=int, default=6, help="pairs of dispatch and combine")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--hold-ms", type=float, default=15, help="the GPU waits for the CPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures and all spans there")
    parser.add_argument("--plot", type=Path, help="draw the timeline, as SVG")
    return parser.parse_args()


# What the ranks found, and what it says. No torch, no GPU.


def end_of(spans: list[dict]) -> float:
    """Milliseconds from the common begin to the last event."""
    return max(span["end_ms"] for span in spans)


def median_run(runs: list[list[list[dict]]]) -> list[list[dict]]:
    """Of runs[iteration][rank] the one whose slowest rank takes the median time."""
    ordered = sorted(runs, key=lambda run: max(map(end_of, run)))
    return ordered[(len(ordered) - 1) // 2]


def stream_ms(run: list[list[dict]], stream: str) -> float:
    """What the slowest rank's stream took."""
    return max(end_of([s for s in spans if s["stream"] == stream]) for spans in run)


def kind_ms(run: list[list[dict]], kind: str) -> float:
    """The median of one kind of work, over all ranks."""
    times = [s["end_ms"] - s["begin_ms"] for spans in run for s in spans if s["kind"] == kind]
    return statistics.median(times)


def summary(runs: dict[str, list[list[dict]]]) -> list[dict]:
    """One line for each scenario. `slowdown`: against the same stream alone. `hidden`: the share of
    the shorter stream's time (alone) that being together saves against one after the other."""
    products = stream_ms(runs[ALONE_PRODUCTS], "products")
    exchanges = stream_ms(runs[ALONE_EXCHANGES], "exchanges")
    lines = []
    for name, run in runs.items():
        streams = {span["stream"] for spans in run for span in spans}
        line: dict = {"name": name, "ms": max(map(end_of, run))}
        if "products" in streams:
            line["products_ms"] = stream_ms(run, "products")
            line["products_slowdown"] = line["products_ms"] / products
            line["product_ms"] = kind_ms(run, "product")
        if "exchanges" in streams:
            line["exchanges_ms"] = stream_ms(run, "exchanges")
            line["exchanges_slowdown"] = line["exchanges_ms"] / exchanges
            line["dispatch_ms"] = kind_ms(run, "dispatch")
            line["combine_ms"] = kind_ms(run, "combine")
        if len(streams) == 2:
            line["hidden"] = (products + exchanges - line["ms"]) / min(products, exchanges)
        lines.append(line)
    return lines


def table(lines: list[dict]) -> str:
    """For people."""
    columns = (
        ("total ms", "ms", "{:.2f}"),
        ("products", "products_ms", "{:.2f}"),
        ("slowdown", "products_slowdown", "{:.2f}x"),
        ("one", "product_ms", "{:.3f}"),
        ("exchanges", "exchanges_ms", "{:.2f}"),
        ("slowdown", "exchanges_slowdown", "{:.2f}x"),
        ("dispatch", "dispatch_ms", "{:.3f}"),
        ("combine", "combine_ms", "{:.3f}"),
        ("hidden", "hidden", "{:.0%}"),
    )
    rows = [f"{'':<26}" + "".join(f"{title:>10}" for title, _, _ in columns)]
    for line in lines:
        cells = (form.format(line[key]) if key in line else "-" for _, key, form in columns)
        rows.append(f"{line['name']:<26}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(rows)


def draw(report: dict) -> str:
    """SVG: every scenario in which streams meet, and those of them alone; two rows a rank."""
    s = report["settings"]
    shown = {
        f"{name}, rank {rank}": spans
        for name, run in report["runs"].items()
        if name != CARVED_ALONE
        for rank, spans in enumerate(run)
    }
    title = (
        f"{s['ranks']} GPUs, {s['tokens']} tokens a rank, hidden {s['hidden']}, top-{s['topk']} of "
        f"{s['experts']} experts, {s['sms']} SMs for exchanges"
    )
    return timeline(title, shown)


# One rank.


@contextmanager
def free_sms(count: int):
    """cuBLAS leaves `count` SMs alone; yields False where torch cannot tell it."""
    import torch

    carve = getattr(torch._C, "_set_sm_carveout_experimental", None)
    library = torch.backends.cuda.preferred_blas_library()
    try:
        if carve is not None:
            torch.backends.cuda.preferred_blas_library("cublaslt")
            carve(count)
        yield carve is not None
    finally:
        if carve is not None:
            carve(None)
            torch.backends.cuda.preferred_blas_library(library)


class Spans:
    """Pairs of events on a stream, and what lay between them."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    @contextmanager
    def note(self, stream, name: str, kind: str):
        """What the body puts on the stream."""
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        self.events.append((name, kind, begin, end))

    def read(self, zero) -> list[dict]:
        """After the GPU is idle."""
        return [
            {
                "stream": name,
                "kind": kind,
                "begin_ms": zero.elapsed_time(begin),
                "end_ms": zero.elapsed_time(end),
            }
            for name, kind, begin, end in self.events
        ]


class Overlap:
    """The two streams of one rank and their work."""

    def __init__(self, args: argparse.Namespace, rank: int, ranks: int) -> None:
        import torch

        import ferry

        self.args = args
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        row_bytes = 2 * args.hidden
        bootstrap = ferry.tcp(
            rank=rank, size=ranks, port=int(os.environ["FERRY_PORT"]),
            secret=os.environ["FERRY_SECRET"],
        )  # fmt: skip
        self.group = ferry.Group(
            bootstrap,
            experts=args.experts,
            backend="cuda",
            device=self.device,
            memory_bytes=4 * ranks * args.tokens * row_bytes + (64 << 20),
        )
        self.products = torch.cuda.Stream()
        self.exchanges = torch.cuda.Stream(priority=-1)
        generator = torch.Generator(device=self.device).manual_seed(args.seed * 1000 + rank)

        def numbers(*shape: int, scale: float = 1.0):
            values = torch.randn(shape, device=self.device, generator=generator) * scale
            return values.to(torch.bfloat16)

        self.left = numbers(args.product_rows, args.hidden)
        self.weight = numbers(args.hidden, args.hidden, scale=args.hidden**-0.5)
        self.out = [torch.empty_like(self.left) for _ in range(2)]
        self.x = numbers(args.tokens, args.hidden)
        scores = torch.rand((args.tokens, args.experts), device=self.device, generator=generator)
        self.plan = self.group.plan(scores.topk(args.topk, dim=1).indices)
        each, more = divmod(args.experts, ranks)  # experts lie on the ranks in contiguous blocks
        to_all = [[r * each + min(r, more) for r in range(ranks)]]
        self.align_plan = self.group.plan(torch.tensor(to_all, device=self.device))
        self.align_x = numbers(1, ALIGN_HIDDEN)
        self.plan.recv_rows(), self.align_plan.recv_rows()  # known, so that no dispatch waits
        torch.cuda.synchronize()

    def multiply(self, spans: Spans, index: int) -> None:
        """One product; each reads what the one before wrote."""
        import torch

        left = self.left if index == 0 else self.out[(index - 1) % 2]
        with torch.cuda.stream(self.products), spans.note(self.products, "products", "product"):
            torch.mm(left, self.weight, out=self.out[index % 2])

    def exchange(self, spans: Spans) -> None:
        """There and back."""
        import torch

        stream, sms = self.exchanges, self.args.sms
        with torch.cuda.stream(stream):
            with spans.note(stream, "exchanges", "dispatch"):
                received = self.group.dispatch(self.x, self.plan, num_sms=sms)
            with spans.note(stream, "exchanges", "combine"):
                self.group.combine(received.x, self.plan, num_sms=sms)

    def run(self, products: bool, exchanges: bool) -> tuple[list[dict], bool]:
        """The spans, and whether all was on the streams before the GPU began with it."""
        import torch

        zero = torch.cuda.Event(enable_timing=True)
        spans = Spans()
        torch.cuda.synchronize()
        self.group.barrier()
        with torch.cuda.stream(self.exchanges):
            torch.cuda._sleep(int(self.args.hold_ms * CYCLES_A_MS))
            aligned = self.group.dispatch(self.align_x, self.align_plan, num_sms=1)
            zero.record(self.exchanges)
        self.products.wait_event(zero)
        count = {True: self.args.products, False: 0}[products]
        pairs = {True: self.args.exchanges, False: 0}[exchanges]
        # In the order in which the GPU will want them.
        for i in range(max(count, pairs)):
            if i < pairs:
                self.exchange(spans)
            if i < count:
                self.multiply(spans, i)
        in_time = not zero.query()
        torch.cuda.synchronize()
        del aligned
        return spans.read(zero), in_time

    def scenario(self, products: bool, exchanges: bool) -> list[list[dict]]:
        """[iteration] of spans."""
        for _ in range(self.args.warmup):
            self.run(products, exchanges)
        found = []
        words = f"products {products}, exchanges {exchanges}"
        for _ in job.shown(range(self.args.iterations), words):
            spans, in_time = self.run(products, exchanges)
            if not in_time:
                raise SystemExit("overlap_timeline: the CPU was late: raise --hold-ms")
            found.append(spans)
        return found


def run_rank(args: argparse.Namespace) -> None:
    """One rank; leaves what it found in a file for the launcher."""
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    overlap = Overlap(args, rank, ranks)
    found = {
        ALONE_PRODUCTS: overlap.scenario(True, False),
        ALONE_EXCHANGES: overlap.scenario(False, True),
        TOGETHER: overlap.scenario(True, True),
    }
    with free_sms(args.sms) as carved:
        if carved:
            found[CARVED_ALONE] = overlap.scenario(True, False)
            found[CARVED] = overlap.scenario(True, True)
    folder = Path(os.environ["OVERLAP_FOLDER"])
    found["gpu"] = torch.cuda.get_device_name()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    overlap.group.destroy()


# The launcher.


def report_of(args: argparse.Namespace, ranks: int, found: list[dict]) -> dict:
    """The file: of every scenario the median run, and what it says."""
    names = [name for name in found[0] if name != "gpu"]
    runs = {
        name: median_run([list(run) for run in zip(*(of_rank[name] for of_rank in found))])
        for name in names
    }
    keys = (
        "tokens", "hidden", "topk", "experts", "sms", "products", "product_rows", "exchanges",
        "iterations", "warmup", "seed",
    )  # fmt: skip
    settings = {"ranks": ranks} | {key: getattr(args, key) for key in keys}
    return job.report(settings, found[0]["gpu"]) | {"summary": summary(runs), "runs": runs}


def launch(args: argparse.Namespace) -> int:
    """Runs this file once for each rank, then shows what they found."""
    ranks = args.ranks or job.gpu_count()
    if ranks == 0:
        print("overlap_timeline: NO GPU", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        if failed := job.launch(ranks, OVERLAP_FOLDER=folder):
            return failed
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    report = report_of(args, ranks, found)
    print(table(report["summary"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        args.plot.write_text(draw(report), encoding="utf-8")
    return 0


def main() -> int:
    """Launcher without RANK in the environment, rank with it."""
    args = arguments()
    if not job.is_rank():
        return launch(args)
    run_rank(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
