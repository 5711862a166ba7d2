"""Draws what `ferry plan` predicted: `ferry plan --plot FILE` runs this.

    python bench/plot_plan.py plan.json --out plan.png

Left the time of each call over the ranks, with the interval that it is in nine times of ten. Right
a heat map: how busy each link is, and the SMs, in parts of the time of the call.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="PNG, SVG or PDF")
    return parser.parse_args()


def draw_times(axes, entries: list[dict]) -> None:
    """A curve for each call, and its interval as a band."""
    for call in dict.fromkeys(entry["call"] for entry in entries):
        points = sorted((e for e in entries if e["call"] == call), key=lambda e: e["ranks"])
        ranks = [point["ranks"] for point in points]
        low, high = ([point[end] for point in points] for end in ("low_us", "high_us"))
        axes.fill_between(ranks, low, high, alpha=0.2)
        label = f"{call} {points[0]['dtype']}"
        axes.plot(ranks, [point["us"] for point in points], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({entry["ranks"] for entry in entries}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks")
    axes.set_ylabel("µs a call")


def busy(entries: list[dict]) -> tuple[list[str], list[str], list[list[float]]]:
    """Links, those that carry anything; calls; and for each link and call the share of the time."""
    columns = [f"{entry['call']} {entry['ranks']}" for entry in entries]
    names = [name for name in entries[0]["phases_us"] if any(e["phases_us"][name] for e in entries)]
    shares = [[entry["phases_us"][name] / entry["us"] for entry in entries] for name in names]
    return names, columns, shares


def draw_links(axes, entries: list[dict]):
    """The heat map; what it returns has the colours."""
    names, columns, shares = busy(entries)
    image = axes.imshow(shares, vmin=0, vmax=1, aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    return image


def main() -> int:
    """Reads, draws, writes."""
    args = arguments()
    try:
        import matplotlib
    except ImportError:
        print("plot_plan: matplotlib is missing (pip install matplotlib)", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "ferry"
    plan = json.loads(args.json.read_text())
    entries = sorted(plan["entries"], key=lambda entry: (entry["call"], entry["ranks"]))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    draw_times(left, entries)
    left.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    left.grid(alpha=0.3)
    left.legend()
    figure.colorbar(draw_links(right, entries), ax=right, label="part of the time")
    figure.suptitle(f"{plan['model']} on {plan['cluster']}, {entries[0]['tokens']:g} tokens a rank")
    figure.savefig(args.out, dpi=130, metadata={"Date": None} if args.out.suffix == ".svg" else {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
