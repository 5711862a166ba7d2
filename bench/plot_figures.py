"""Draws the figures of a benchmark in Python as bars, as SVG, without any library.

    python bench/plot_figures.py data_parallel figures.json --out figures.svg

figures.json: what --json of bench/data_parallel.py wrote; its own --plot FILE does the same. What
`ferry bench` and bench/torch_exchange.py measured, plot_exchange.py draws.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plot_pages

Values = dict[str, float]


def size_text(count: int) -> str:
    for unit, bytes_of in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= bytes_of:
            return f"{count / bytes_of:g} {unit}"
    return f"{count} B"


def of_collectives(facts: Any) -> Values:
    return {
        f"{one['call']} {size_text(one['bytes'])}, {who}": figure["wall_us"]
        for one in facts["results"]
        for who, figure in one["figures"].items()
    }


def of_data_parallel(facts: Any) -> Values:
    return {name: figure["wall_us"] / 1e3 for name, figure in facts["figures"].items()}


def of_balance(facts: Any) -> Values:
    return {
        f"skew {run['skew']}, {name}": took
        for run in facts["runs"]
        for name, took in run["step_ms"].items()
    }


def of_balanced_exchange(facts: Any) -> Values:
    return {
        f"{order}, {name}": took
        for order, times in facts["us"].items()
        for name, took in times.items()
    }


def of_deep_ep_calls(facts: Any) -> Values:
    return {
        f"{name}, {who}": figure[key]
        for name, figure in facts["figures"].items()
        for who, key in (("Ferry", "ferry_us"), ("deep_ep", "deep_ep_us"))
    }


def of_compare(records: Any) -> Values:
    return {
        f"{one['name']}, {one['dtype']}, {one['tokens']} tokens, {one['sms']} SMs": one["after_us"]
        / one["before_us"]
        for one in records
        if one["before_us"] > 0
    }


#: Of a program: the title, the unit behind a bar, and the bars.
FIGURES: dict[str, tuple[str, str, Callable[[Any], Values]]] = {
    "balance": ("A step of a training", "ms", of_balance),
    "balanced_batches": ("A step of a training", "ms", lambda facts: facts["step_ms"]),
    "balanced_exchange": ("Dispatch and combine", "µs", of_balanced_exchange),
    "collectives": ("Collectives", "µs", of_collectives),
    "collectives_gpu": ("Collectives", "µs", of_collectives),
    "compare": ("After over before", "×", of_compare),
    "data_parallel": ("A step of a training", "ms", of_data_parallel),
    "deep_ep_calls": ("Calls of deep_ep and Ferry's own", "µs", of_deep_ep_calls),
    "gradient_formats": ("Held-out loss", "nats", lambda facts: facts["held_out_means"]),
}


def drawn(program: str, facts: Any) -> str:
    """As SVG."""
    title, unit, values_of = FIGURES[program]
    return plot_pages.bars(title, unit, values_of(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", choices=FIGURES)
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="SVG")
    args = parser.parse_args()
    facts = json.loads(args.json.read_text(encoding="utf-8"))
    args.out.write_text(drawn(args.program, facts), encoding="utf-8")


if __name__ == "__main__":
    main()
