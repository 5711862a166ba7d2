"""Draws what `ferry bench --backend cuda --json` and bench/torch_exchange.py measured.

    python bench/plot_exchange.py ferry.json [nccl.json ...] --out exchange.png

One row of axes for each number of tokens a rank: logical GB/s and microseconds over the number of
SMs; measurements that have no SMs of their own (NCCL) are dashed lines. With one number of SMs and
several of tokens the axis is the tokens, and times are drawn log-log: what a call costs at least,
and from where on its bytes decide.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


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
        moves = line["row_bytes"] > 0
        if not moves and (axis, key) != ("tokens", "p50_us"):
            continue
        label = f"{line['name']}, {line['dtype']}" if moves else line["name"]
        series.setdefault(label, []).append(line)
    for points in series.values():
        points.sort(key=lambda line: line[axis])
    return series


def draw(axes, lines: list[dict], axis: str, key: str) -> None:
    """One set of axes: a curve for each series, a dashed line for one without SMs."""
    for label, points in sorted(series_of(lines, axis, key).items()):
        if axis == "sms" and all(not point["sms"] for point in points):
            axes.axhline(points[0][key], linestyle="--", linewidth=1, label=label, color="gray")
            continue
        style = "-" if any(point["sms"] for point in points) else "--"
        axes.plot(
            [p[axis] for p in points], [p[key] for p in points], style, marker="o", label=label
        )
    axes.set_xlabel("SMs" if axis == "sms" else "tokens a rank")
    axes.set_ylabel("logical GB/s and GPU" if key == "logical_gbps" else "µs a call (median)")
    if axis == "tokens":
        axes.set_xscale("log", base=2)
    if (axis, key) == ("tokens", "p50_us"):
        axes.set_yscale("log", base=10)
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3, which="both")


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

    matplotlib.rcParams["axes.prop_cycle"] = plt.cycler(color=plt.get_cmap("tab20").colors)
    runs = [json.loads(path.read_text()) for path in args.json]
    lines = [line for run in runs for line in run["results"]]
    tokens = sorted({line["tokens"] for line in lines})
    by_tokens = len(tokens) > 1 and len({line["sms"] for line in lines if line["sms"]}) <= 1
    groups = [tokens] if by_tokens else [[count] for count in tokens]
    figure, axes = plt.subplots(
        len(groups), 2, figsize=(13, 4.6 * len(groups)), squeeze=False, layout="constrained"
    )
    for row, group in zip(axes, groups):
        some = [line for line in lines if line["tokens"] in group]
        for place, key in zip(row, ("logical_gbps", "p50_us")):
            draw(place, some, "tokens" if by_tokens else "sms", key)
        row[0].set_title("" if by_tokens else f"{group[0]} tokens a rank")
        row[1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1))
    shape = runs[0]["settings"]
    figure.suptitle(
        f"{shape['ranks']} GPUs, hidden {shape['hidden']}, top-{shape['topk']} of "
        f"{shape['experts']} experts, {runs[0]['time']}"
    )
    figure.savefig(args.out, dpi=130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
