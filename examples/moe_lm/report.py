"""What the demo says at the end: checks, the loss curve as text and as a picture, and files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

PICTURE = "loss.png"
SUMMARY = "summary.json"

_BIGRAM_FACTOR = 0.85
_ZEROED_FACTOR = 1.05
_COMPARED_STEPS = 100
_STEP_TOLERANCE = 1e-4
_FINAL_TOLERANCE = 0.01
CPU_STEPS = 10
_CPU_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Check:
    """One promise of the demo: what was promised, what was found, whether that is kept."""

    promise: str
    found: str
    passed: bool


def check(sharded: dict[str, Any], single: dict[str, Any], bigram: float) -> list[Check]:
    """Hold the two runs against the promises."""
    loss, zeroed = sharded["final_held_out"], sharded["zeroed_held_out"]
    pairs = list(zip(sharded["losses"], single["losses"]))
    apart = [abs(a - b) / abs(b) for a, b in pairs]
    worst = max(apart[:_COMPARED_STEPS])
    equal = next((step for step, gap in enumerate(apart) if gap != 0), len(apart))
    final = abs(loss - single["final_held_out"]) / single["final_held_out"]
    ranks = sharded["ranks"]
    return [
        Check(
            f"held-out loss ≤ {_BIGRAM_FACTOR} × byte bigram's",
            f"{loss:.4f} = {loss / bigram:.3f} × {bigram:.4f}",
            loss <= _BIGRAM_FACTOR * bigram,
        ),
        Check(
            f"experts zeroed: ≥ {_ZEROED_FACTOR - 1:.0%} worse",
            f"{zeroed:.4f}, {zeroed / loss - 1:.0%} worse",
            zeroed >= _ZEROED_FACTOR * loss,
        ),
        Check(
            f"{ranks} ranks = 1: {_COMPARED_STEPS} losses within {_STEP_TOLERANCE:.0e}",
            f"{worst:.1e}; same bits for {equal} steps",
            len(apart) >= _COMPARED_STEPS and worst <= _STEP_TOLERANCE,
        ),
        Check(
            f"{ranks} ranks = 1: held-out within {_FINAL_TOLERANCE:.0%}",
            f"{final:.1e}",
            final <= _FINAL_TOLERANCE,
        ),
    ]


def check_first_losses(sharded: dict[str, Any], on_cpu: dict[str, Any]) -> Check:
    """Hold a run on GPUs against the first steps of one on the CPU."""
    pairs = list(zip(sharded["losses"], on_cpu["losses"]))[:CPU_STEPS]
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    return Check(
        f"GPUs = CPU: {CPU_STEPS} losses within {_CPU_TOLERANCE:.0e}",
        f"{worst:.1e}",
        len(pairs) == CPU_STEPS and worst <= _CPU_TOLERANCE,
    )


def save(
    out: Path, sharded: dict[str, Any], single: dict[str, Any], bigram: float, checks: list[Check]
) -> None:
    """Write the picture and `summary.json` into `out`."""
    _draw(out / PICTURE, sharded, single, bigram)
    summary = {
        "bigram_held_out": bigram,
        "checks": [asdict(item) for item in checks],
        "runs": [sharded, single],
    }
    (out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")


def show(
    console: Console,
    sharded: dict[str, Any],
    single: dict[str, Any],
    bigram: float,
    checks: list[Check],
) -> None:
    """Print the curve, the speeds and the checks."""
    console.print(
        f"\nTraining loss in nats a byte, {sharded['ranks']} ranks (─ byte bigram)", highlight=False
    )
    for line in text_curve(sharded["losses"], bigram):
        console.print(line, highlight=False, markup=False)
    console.print(_speeds([sharded, single]))
    table = Table("", "promised", "found", box=None, pad_edge=False)
    for item in checks:
        mark = "[green]PASS[/]" if item.passed else "[bold red]FAIL[/]"
        table.add_row(mark, item.promise, item.found)
    console.print(table)


def text_curve(losses: list[float], level: float, width: int = 72, height: int = 14) -> list[str]:
    """A curve of `losses` in `height` lines of text, with a line at `level`.

    Each column is the mean of its steps; columns above 1.3 × `level` are left out.
    """
    width = min(width, len(losses))
    edges = [len(losses) * column // width for column in range(width + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)]
    top, bottom = 1.3 * level, min(*means, level) - 0.05

    def row_of(value: float) -> int:
        return round((top - value) / (top - bottom) * (height - 1))

    grid = [[" "] * width for _ in range(height)]
    grid[row_of(level)] = ["─"] * width
    for column, mean in enumerate(means):
        if mean <= top:
            grid[row_of(mean)][column] = "●"
    lines = []
    for row, cells in enumerate(grid):
        value = top - (top - bottom) * row / (height - 1)
        lines.append(f"{value:6.2f} ┤{''.join(cells)}")
    steps = f"{len(losses)} steps"
    lines.append(f"{'':6} └{'─' * width}")
    lines.append(f"{'':8}0{steps:>{max(width - 1, 0)}}")
    return lines


def _speeds(runs: list[dict[str, Any]]) -> Table:
    table = Table("", *(f"ranks: {run['ranks']}" for run in runs), box=None, pad_edge=False)
    rows = {
        "tokens a second": "{tokens_per_second:,.0f}",
        "time in exchanges": "{exchange_share:.0%}",
        "  of which waiting for other ranks": "{exchange_wait_share:.0%}",
        "time in all-reduce (dense gradients)": "{all_reduce_share:.0%}",
        "seconds with start and evaluation": "{seconds:.0f}",
        "CPU seconds of all ranks": "{cpu_seconds:.0f}",
    }
    for name, form in rows.items():
        table.add_row(name, *(form.format(**run) for run in runs))
    table.add_row()
    return table


def _draw(path: Path, sharded: dict[str, Any], single: dict[str, Any], bigram: float) -> None:
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    steps = range(1, len(sharded["losses"]) + 1)
    axes.plot(
        steps, sharded["losses"], lw=3, alpha=0.4, label=f"training, {sharded['ranks']} ranks"
    )
    axes.plot(steps, single["losses"], lw=1, ls="--", color="black", label="training, 1 rank")
    if sharded["held_out"]:
        axes.plot(*zip(*sharded["held_out"]), "o-", color="tab:orange", label="held out (a sample)")
    axes.plot(steps[-1], sharded["final_held_out"], "*", ms=14, color="tab:red", label="held out")
    axes.axhline(bigram, color="tab:gray", label="byte bigram, held out")
    axes.axhline(
        _BIGRAM_FACTOR * bigram, color="tab:gray", ls=":", label=f"{_BIGRAM_FACTOR} × bigram"
    )
    axes.set(
        title=f"MoE language model, experts sharded over {sharded['ranks']} ranks by Ferry",
        xlabel="step",
        ylabel="loss (nats a byte)",
        ylim=(None, 1.6 * bigram),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
