"""Draws what `ferry bench --json` and bench/torch_exchange.py measured: `ferry bench --plot FILE`
runs this.

    python bench/plot_exchange.py ferry.json [nccl.json ...] --out exchange.png

One row of axes for each number of tokens a rank: logical GB/s and microseconds over the number of
SMs; measurements that have no SMs of their own (NCCL) are dashed lines. With one number of SMs and
several of tokens the axis is the tokens, and times are drawn log-log: what a call costs at least,
and from where on its bytes decide. Where no call was measured more than once (on CPUs) there is a
bar for each: the median, and a line to the 95th percentile.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

#: Differ in print, too: with seven colours and markers 49 curves are told apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#56b4e9", "#8c6d1f")
MARKERS = "os^Dv*P"
LABELS = {"logical_gbps": "logical GB/s of a rank", "p50_us": "µs a call (median)"}


def style_of(number: int) -> dict[str, str]:
    """Of the curve with this number: colour and marker are not those of the one before."""
    turn = number // len(COLOURS)
    return {"color": COLOURS[number % 7], "marker": MARKERS[(number + turn) % 7]}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("json", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="PNG, SVG or PDF")
    return parser.parse_args()


def series_of(lines: list[dict], axis: str, key: str) -> dict[str, list[dict]]:
    """Lines that differ in `axis` only, by their label. Those that move no rows (plan) have a time
    that depends on the tokens alone."""
    series: dict[str, list[dict]] = {}
    for line in lines:
        moves = line["logical_gbps"] > 0
        if not moves and (axis, key) != ("tokens", "p50_us"):
            continue
        label = f"{line['name']}, {line['dtype']}" if moves else line["name"]
        series.setdefault(label, []).append(line)
    for points in series.values():
        points.sort(key=lambda line: line[axis])
    return series


def draw(axes, lines: list[dict], axis: str, key: str) -> None:
    """One set of axes: a curve for each series, on GPUs a dashed line for one without SMs."""
    on_gpus = any(line["sms"] for line in lines)
    for number, (label, points) in enumerate(sorted(series_of(lines, axis, key).items())):
        if axis == "sms" and on_gpus and all(not point["sms"] for point in points):
            axes.axhline(points[0][key], linestyle="--", linewidth=1, label=label, color="gray")
            continue
        style = "--" if on_gpus and not any(point["sms"] for point in points) else "-"
        x, y = [p[axis] for p in points], [p[key] for p in points]
        axes.plot(x, y, style, label=label, **style_of(number))
    axes.set_xlabel("SMs" if axis == "sms" else "tokens a rank")
    axes.set_ylabel(LABELS[key])
    if axis == "tokens":
        axes.set_xscale("log", base=2)
    if (axis, key) == ("tokens", "p50_us"):
        axes.set_yscale("log", base=10)
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, which="both")


def draw_bars(axes, lines: list[dict], key: str) -> None:
    """A bar for each line, with its number; the first one on top."""
    some = [line for line in lines if line["logical_gbps"] > 0 or key == "p50_us"]
    values = [line[key] for line in some]
    labels = [f"{line['name']}, {line['dtype']}, {line['tokens']} tokens" for line in some]
    above = [line["p95_us"] - line["p50_us"] if key == "p50_us" else 0 for line in some]
    bars = axes.barh(range(len(some)), values, color=COLOURS[5], xerr=([0] * len(some), above))
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize="small")
    axes.set_yticks(range(len(some)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(LABELS[key])
    axes.grid(alpha=0.3, axis="x")


def figure_of_bars(plt, lines: list[dict]):
    """Rates and times side by side."""
    size = (15, 1.2 + 0.32 * len(lines))
    figure, axes = plt.subplots(1, 2, figsize=size, layout="constrained")
    for place, key in zip(axes, LABELS):
        draw_bars(place, lines, key)
    return figure


def figure_of_curves(plt, lines: list[dict]):
    """A row of axes for each number of tokens, or one over the tokens."""
    tokens = sorted({line["tokens"] for line in lines})
    by_tokens = len(tokens) > 1 and len({line["sms"] for line in lines if line["sms"]}) <= 1
    groups = [tokens] if by_tokens else [[count] for count in tokens]
    figure, axes = plt.subplots(
        len(groups), 2, figsize=(13, 4.6 * len(groups)), squeeze=False, layout="constrained"
    )
    for row, group in zip(axes, groups):
        some = [line for line in lines if line["tokens"] in group]
        for place, key in zip(row, LABELS):
            draw(place, some, "tokens" if by_tokens else "sms", key)
        row[0].set_title("" if by_tokens else f"{group[0]} tokens a rank")
        row[1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def main() -> int:
    """Reads, draws, writes."""
    args = arguments()
    try:
        import matplotlib
    except ImportError:
        print("plot_exchange: matplotlib is missing (pip install matplotlib)", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [json.loads(path.read_text()) for path in args.json]
    lines = [line for run in runs for line in run["results"]]
    calls = {(line["name"], line["dtype"]) for line in lines}
    make = figure_of_bars if len(calls) == len(lines) else figure_of_curves
    figure = make(plt, lines)
    shape = runs[0]["settings"]
    on = "GPUs" if any(line["sms"] for line in lines) else "ranks"
    figure.suptitle(
        f"{shape['ranks']} {on}, hidden {shape['hidden']}, top-{shape['topk']} of "
        f"{shape['experts']} experts, {runs[0]['time']}"
    )
    figure.savefig(args.out, dpi=130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
