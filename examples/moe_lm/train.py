"""Trains a small MoE language model on the Python standard library, its tokens carried by Ferry.

Runs it twice, experts sharded over 4 ranks and on 1 rank, and compares the two:

    python examples/moe_lm/train.py

On a machine with GPUs, and a Ferry built with the CUDA engine, the ranks run on GPUs, round-robin.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import ferry
import report
from data import bigram_loss, load_corpus, windows
from settings import Settings

_WORKER = Path(__file__).with_name("worker.py")
_POLL_SECONDS = 0.1
_END_SECONDS = 15.0


def main() -> int:
    """Train, compare, report; returns 0 when every check passed."""
    arguments = parse_arguments()
    console = Console()
    started = time.perf_counter()
    settings = Settings(steps=arguments.steps)
    corpus = load_corpus()
    scored = windows(corpus.held_out, settings.held_out_windows, settings.context)
    bigram, smoothing = bigram_loss(corpus.train, scored)
    console.print(
        f"text: {corpus.files} source files of {corpus.root}\n"
        f"      {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out\n"
        f"model: {settings.layers} layers of width {settings.width}, "
        f"{settings.experts} experts each, top-{settings.top_k}\n"
        f"to beat: a byte-bigram model at {bigram:.3f} nats a byte (smoothing {smoothing:g})\n",
        highlight=False,
    )
    if arguments.device == "cuda":
        console.print(f"ranks on {torch.cuda.device_count()} GPUs, round-robin\n", highlight=False)
    with progress_bar(console) as progress:
        sharded = run_ranks(arguments.ranks, arguments, settings, progress)
        single = run_ranks(1, arguments, settings, progress)
        if arguments.device == "cuda":
            first = run_ranks(1, arguments, settings, progress, report.CPU_STEPS)
    checks = report.check(sharded, single, bigram)
    if arguments.device == "cuda":
        checks.append(report.check_first_losses(sharded, first))
    report.save(arguments.out, sharded, single, bigram, checks)
    report.show(console, sharded, single, bigram, checks)
    passed = all(check.passed for check in checks)
    console.print(f"\nthe loss curve as a picture: {arguments.out / report.PICTURE}")
    console.print(
        f"{'PASS' if passed else 'FAIL'} in {time.perf_counter() - started:.0f} s",
        style="bold green" if passed else "bold red",
        highlight=False,
    )
    return 0 if passed else 1


def parse_arguments() -> argparse.Namespace:
    """The command line, with the `ferry` program found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4), help="default: 4")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="default: %(default)s"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs where there are some and Ferry has its CUDA engine",
    )
    parser.add_argument("--ferry", help="the `ferry` program; default: this Python's, or on PATH")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count() if ferry.has_cuda else 0
    if arguments.device == "cuda" and not gpus:
        parser.error("--device cuda: no GPU here, or a build of Ferry without the CUDA engine")
    if arguments.device == "auto":
        arguments.device = "cuda" if gpus else "cpu"
    beside = Path(sys.executable).with_name("ferry")
    arguments.ferry = arguments.ferry or shutil.which(beside) or shutil.which("ferry")
    if arguments.ferry is None:
        parser.error(
            f"no `ferry` program beside {sys.executable} or on PATH; `make demo` builds it"
        )
    return arguments


def progress_bar(console: Console) -> Progress:
    """A bar for each run: steps, loss, time."""
    return Progress(
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[doing]}"),
        TimeElapsedColumn(),
        console=console,
    )


def run_ranks(
    ranks: int,
    arguments: argparse.Namespace,
    settings: Settings,
    progress: Progress,
    cpu_steps: int = 0,
) -> dict[str, Any]:
    """Train on `ranks` processes under `ferry run`; returns rank 0's `result.json`.

    cpu_steps: > 0: only so many steps, on the CPU.
    """
    device = "cpu" if cpu_steps else arguments.device
    steps = cpu_steps or settings.steps
    out = arguments.out / f"ranks-{ranks}{'-cpu' if cpu_steps else ''}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    name = f"{ranks} rank{'s' if ranks > 1 else ''}{', CPU' if cpu_steps else ''}"
    task = progress.add_task(name, total=steps, loss="–", doing="starting")
    command = [arguments.ferry, "run", "-n", str(ranks), "--", sys.executable, str(_WORKER)]
    command += ["--out", str(out), "--steps", str(settings.steps)]
    command += ["--device", device, "--stop-after", str(steps)]
    # One thread a rank, also in libraries that torch loads.
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    started = said = time.perf_counter()
    if not progress.console.is_terminal:
        progress.console.print(f"{name}: starting")
    with (out / "log.txt").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            for line in follow(out / "progress.jsonl", job):
                last = line["step"] == steps
                doing = "evaluating" if last else "training"
                loss = f"{line['loss']:.3f}"
                progress.update(task, completed=line["step"], loss=loss, doing=doing)
                if progress.console.is_terminal:
                    continue
                if "held_out" in line or time.perf_counter() - said >= 2:
                    said = time.perf_counter()
                    held_out = f", held out {line['held_out']:.3f}" if "held_out" in line else ""
                    progress.console.print(
                        f"{name}: step {line['step']} of {steps}, loss {loss}{held_out}"
                    )
        finally:
            end(job)
    progress.update(task, doing="failed" if job.returncode else "done")
    if job.returncode != 0:
        progress.stop()
        sys.stderr.write((out / "log.txt").read_text(errors="replace"))
        raise SystemExit(f"the run on {name} failed with exit code {job.returncode}; see {out}")
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result | {"seconds": time.perf_counter() - started}


def end(job: subprocess.Popen[bytes]) -> None:
    """End `ferry run`, which ends its ranks; nothing happens when it has ended already."""
    job.terminate()
    try:
        job.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def follow(path: Path, job: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The lines of a growing JSON-lines file, until `job` ends."""
    place, rest, running = 0, "", True
    while running:
        running = job.poll() is None
        if path.exists():
            with path.open() as lines:
                lines.seek(place)
                rest += lines.read()
                place = lines.tell()
            *whole, rest = rest.split("\n")
            yield from map(json.loads, whole)
        if running:
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
