"""The picture of a trace, by matplotlib."""

from __future__ import annotations

from typing import Any

#: Told apart in print, too: from light to dark, with hatches.
LOOKS = (
    ("#56b4e9", ""),
    ("#e69f00", "///"),
    ("#009e73", ""),
    ("#cc79a7", "\\\\\\"),
    ("#0072b2", ""),
    ("#d55e00", "..."),
)
MOST_BOXES = 20_000  # of a picture


def spans_of(events: list[dict[str, Any]]) -> tuple[list[str], dict[int, list[dict[str, Any]]]]:
    """Names of the calls, and of each rank its calls and waits by their begin."""
    spans = [event for event in events if event["ph"] == "X"]
    calls = dict.fromkeys(event["name"] for event in spans if event["cat"] == "call")
    ranks: dict[int, list[dict[str, Any]]] = {}
    for event in sorted(spans, key=lambda event: event["ts"]):
        ranks.setdefault(event["pid"], []).append(event)
    return list(calls), ranks


def draw(axes: Any, events: list[dict[str, Any]]) -> None:
    """A row for each rank: boxes are calls, the dark line at the foot of a box is a wait. Time runs
    in milliseconds from the first event."""
    calls, ranks = spans_of(events)
    first = min((event["ts"] for of in ranks.values() for event in of), default=0.0)
    order = sorted(ranks)
    for row, rank in enumerate(order):
        for number, name in enumerate(calls):
            colour, hatch = LOOKS[number % len(LOOKS)]
            boxes = [
                ((event["ts"] - first) / 1e3, event["dur"] / 1e3)
                for event in ranks[rank]
                if (event["cat"], event["name"]) == ("call", name)
            ]
            label = name if row == 0 else "_"  # one entry of the legend
            look = {"facecolors": colour, "edgecolors": "white", "linewidth": 0, "hatch": hatch}
            axes.broken_barh(boxes, (row - 0.4, 0.8), label=label, **look)
        waits = [
            ((event["ts"] - first) / 1e3, event["dur"] / 1e3)
            for event in ranks[rank]
            if event["cat"] == "wait"
        ]
        label = "waiting" if row == 0 else "_"
        axes.broken_barh(waits, (row + 0.2, 0.2), facecolors="#333333", label=label)
    axes.set_yticks(range(len(order)), [f"rank {rank}" for rank in order])
    axes.invert_yaxis()
    axes.set_xlabel("ms")


def draw_file(made: dict[str, Any], image: str) -> None:
    """PNG, SVG or PDF, by its ending; of a long trace the first calls."""
    from matplotlib.figure import Figure

    events = sorted(made["traceEvents"], key=lambda event: event.get("ts", 0.0))[:MOST_BOXES]
    ranks = len({event["pid"] for event in events})
    figure = Figure(figsize=(12, 1.4 + 0.5 * ranks), layout="constrained")
    axes = figure.subplots()
    draw(axes, events)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")
    figure.savefig(image, dpi=130)
