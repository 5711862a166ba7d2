"""Draws what ranks measured of each other as heat maps: `ferry doctor --net --plot FILE` and
`ferry doctor --waits FILE... --plot FILE` run this.

    python bench/plot_matrix.py net.json --out net.png      # net.json: ferry doctor --net --json

Of links: the latency and the rate of each pair. Of waits: who waited for whom, and beside it how
long a rank was ready to run and had no CPU. What is odd is said below.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

NUMBERED = 16  # ranks up to which cells have their number
CHARACTERS = 14  # of the words below, to an inch, so that a margin is left
IN_MS = 1e7  # nanoseconds of the longest wait from which on waits are drawn in milliseconds


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="PNG, SVG or PDF")
    return parser.parse_args()


def without_diagonal(matrix: list[list[float]], unit: float) -> list[list[float]]:
    """In units; no rank measures itself."""
    return [
        [float("nan") if i == j else value / unit for j, value in enumerate(row)]
        for i, row in enumerate(matrix)
    ]


def panels_of(found: dict) -> list[dict]:
    """What is drawn side by side: title, matrix, and the words at its axes. `worst`: the largest
    values are the bad ones."""
    if "waits_ns" in found:
        waits = found["waits_ns"]
        longest = max(value for row in waits for value in row)
        unit, name = (1e6, "ms") if longest >= IN_MS else (1e3, "µs")
        no_cpu = [[row[i] / unit] for i, row in enumerate(waits)]
        panels = [
            {"title": f"Waits, {name}", "values": without_diagonal(waits, unit), "worst": True}
            | {"x": "waited for", "y": "who waits"}
        ]
        if any(row[0] for row in no_cpu):
            panels.append({"title": f"No CPU, {name}", "values": no_cpu, "worst": True})
        return panels
    return [
        {"title": "Latency, µs", "values": without_diagonal(found["latency_ns"], 1e3)}
        | {"worst": True, "x": "rank", "y": "rank"},
        {"title": "Rate, MB/s", "values": without_diagonal(found["bytes_per_s"], 1e6)}
        | {"worst": False, "x": "to", "y": "from"},
    ]


def short(value: float) -> str:
    """At most five characters."""
    if 0 < value < 1:
        return f"{value:.2f}"
    return f"{value:.3g}" if value < 1000 else f"{value / 1e3:.3g}k"


def borders_of(domains: list[int]) -> list[float]:
    """Between which ranks a domain ends."""
    return [i - 0.5 for i in range(1, len(domains)) if domains[i] != domains[i - 1]]


def draw(axes, panel: dict, domains: list[int]):
    """One heat map, dark where it is bad, in print as well; what it returns has the colours."""
    values = panel["values"]
    image = axes.imshow(values, cmap="cividis_r" if panel["worst"] else "cividis", vmin=0)
    axes.set_title(panel["title"])
    axes.set_xlabel(panel.get("x", ""))
    axes.set_ylabel(panel.get("y", ""))
    axes.set_yticks(range(len(values)))
    axes.set_xticks(range(len(values[0])) if len(values[0]) > 1 else [])
    shown = [value for row in values for value in row if value == value]
    middle = max(shown, default=0) / 2
    for i, row in enumerate(values) if len(values) <= NUMBERED else ():
        for j, value in enumerate(row):
            if value == value:
                dark = value > middle if panel["worst"] else value < middle
                colour = "white" if dark else "black"
                axes.text(j, i, short(value), ha="center", va="center", color=colour, size=8)
    for border in borders_of(domains):
        axes.axhline(border, color="white", linewidth=2)
        axes.axvline(border, color="white", linewidth=2)
    return image


def main() -> int:
    """Reads, draws, writes."""
    args = arguments()
    try:
        import matplotlib
    except ImportError:
        print("plot_matrix: matplotlib is missing (pip install matplotlib)", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "ferry"
    found = json.loads(args.json.read_text(encoding="utf-8"))
    panels = panels_of(found)
    widths = [max(len(panel["values"][0]), 2) for panel in panels]
    ranks = len(panels[0]["values"])
    height = min(max(3.4, 1.6 + 0.45 * ranks), 12)
    width = min(2.4 * len(panels) + 0.55 * sum(widths), 24)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(width, height),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    for place, panel in zip(axes[0], panels):
        figure.colorbar(draw(place, panel, found.get("domains", [])), ax=place)
    lines = [textwrap.fill(odd, int(CHARACTERS * width)) for odd in found["odd"]]
    figure.supxlabel("\n".join(lines) or "Nothing odd.", size=9)
    figure.savefig(args.out, dpi=130, metadata={"Date": None} if args.out.suffix == ".svg" else {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
