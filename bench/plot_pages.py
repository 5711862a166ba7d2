"""Draws the plots of docs/ from bench/results, as SVG, without any library.

python bench/plot_pages.py            writes docs/plots/*.svg
python bench/plot_pages.py --check    fails if one of them is not what would be written
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PLOTS = ROOT / "bench" / "results", ROOT / "docs" / "plots"
COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#787774", "#c14c8a")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 760, 340, 62, 34, 46, 210


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    at = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {at} stroke="{colour}"/>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {at} fill="{colour}"/>'


def page(title: str, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#37352f">'
    )
    first = [box(0, 0, WIDTH, height, "#ffffff"), text(LEFT, 20, title, more=' font-size="14"')]
    return "\n".join([head, *first, *parts, "</svg>", ""])


def nice_step(largest: float) -> float:
    """Of about five ticks: 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(largest / 5))
    return next(n * power for n in (1, 2, 5, 10) if n * power * 5 >= largest)


def curves(title: str, x_label: str, series: dict[str, list]) -> str:
    """Points (x, y) of each series; x from tick to tick alike, whatever the numbers."""
    ticks = sorted({x for points in series.values() for x, _ in points})
    step = nice_step(max(y for points in series.values() for _, y in points))
    top = step * math.ceil(max(y for points in series.values() for _, y in points) / step)
    right, bottom = WIDTH - LEGEND, HEIGHT - BOTTOM
    at_x = {x: LEFT + (i + 0.5) * (right - LEFT) / len(ticks) for i, x in enumerate(ticks)}

    def at_y(y: float) -> float:
        return bottom - (bottom - TOP) * y / top

    parts = [text((LEFT + right) / 2, HEIGHT - 10, x_label, "middle")]
    for i in range(round(top / step) + 1):
        y = at_y(i * step)
        parts += [line(LEFT, y, right, y, "#e3e2e0"), text(LEFT - 6, y + 4, f"{i * step:g}", "end")]
    parts += [text(x, bottom + 16, f"{tick}", "middle") for tick, x in at_x.items()]
    for i, (name, points) in enumerate(series.items()):
        colour, y = COLOURS[i], TOP + 14 + 20 * i
        way = " ".join(f"{at_x[x]:.1f},{at_y(value):.1f}" for x, value in sorted(points))
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [box(at_x[x] - 3, at_y(v) - 3, 6, 6, colour) for x, v in sorted(points)]
        parts += [box(right + 14, y - 9, 10, 10, colour), text(right + 30, y, name)]
    return page(title, HEIGHT, parts)


def bars(title: str, unit: str, values: dict[str, float]) -> str:
    """One bar for each value, its number behind it."""
    left, row = max(190, 7 * max(map(len, values))), 24
    scale = (WIDTH - left - 90) / max(values.values())
    parts = []
    for i, (name, value) in enumerate(values.items()):
        y = TOP + row * i
        colour = COLOURS[4] if name.startswith(("copy", "Gloo")) else COLOURS[0]
        parts += [text(left - 8, y + 14, name, "end"), box(left, y + 3, value * scale, 15, colour)]
        parts.append(text(left + value * scale + 6, y + 14, f"{value:.1f} {unit}"))
    return page(title, TOP + row * len(values) + 14, parts)


def loads(title: str, panels: dict[str, list[list[int]]]) -> str:
    """Panels above each other: in each step the load of every rank over the mean, one line a rank.
    All panels have the same scale."""
    shares = {
        name: [[load * len(row) / sum(row) for load in row] for row in rows]
        for name, rows in panels.items()
    }
    top = math.ceil(2 * max(max(row) for rows in shares.values() for row in rows)) / 2
    left, right, height, gap = LEFT, WIDTH - 30, 150, 40
    parts, y = [], TOP + 14
    for name, rows in shares.items():
        bottom = y + height
        parts.append(text(left, y - 4, name))
        for i in range(round(2 * top) + 1):
            at = bottom - height * i / 2 / top
            parts += [
                line(left, at, right, at, "#e3e2e0"),
                text(left - 6, at + 4, f"{i / 2:g}", "end"),
            ]
        step = (right - left) / (len(rows) - 1)
        for rank in range(len(rows[0])):
            way = " ".join(
                f"{left + step * i:.1f},{bottom - height * row[rank] / top:.1f}"
                for i, row in enumerate(rows)
            )
            colour = COLOURS[rank % len(COLOURS)]
            parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}"/>')
        y = bottom + gap
    parts += [
        text(left, y - gap + 16, "step 0"),
        text(right, y - gap + 16, f"{len(rows) - 1}", "end"),
    ]
    return page(title, y - gap + 26, parts)


def deaths(title: str, death: str, runs: dict[str, list], tokens: int) -> str:
    """Tokens a second of new steps over time, in windows; a rank dies at 0. Tokens of a step are
    spread over the time since the step before."""
    begin, end, window = -4.0, 8.0, 0.25
    right, bottom = WIDTH - LEGEND, HEIGHT - BOTTOM
    rates: dict[str, list[float]] = {}
    for name, steps in runs.items():
        rates[name] = [0.0] * round((end - begin) / window)
        for (before, _, _), (at, _, _) in itertools.pairwise(steps):
            for k in range(len(rates[name])):
                first = begin + k * window
                shared = min(at, first + window) - max(before, first)
                rates[name][k] += max(shared, 0) * tokens / (at - before) / window
    tick = nice_step(max(map(max, rates.values())))
    top = tick * math.ceil(max(map(max, rates.values())) / tick)
    scale = (right - LEFT) / (end - begin)
    parts = [text((LEFT + right) / 2, HEIGHT - 10, "seconds", "middle")]
    for i in range(round(top / tick) + 1):
        y = bottom - (bottom - TOP) * i * tick / top
        parts += [line(LEFT, y, right, y, "#e3e2e0"), text(LEFT - 6, y + 4, f"{i * tick:g}", "end")]
    for second in range(int(begin), int(end) + 1, 2):
        parts.append(text(LEFT + (second - begin) * scale, bottom + 16, f"{second}", "middle"))
    zero = LEFT - begin * scale
    parts += [line(zero, TOP, zero, bottom, COLOURS[5]), text(zero + 5, TOP + 12, death)]
    for i, (name, values) in enumerate(rates.items()):
        colour, y = COLOURS[i], TOP + 14 + 20 * i
        way = " ".join(
            f"{LEFT + (window * (k + at)) * scale:.1f},{bottom - (bottom - TOP) * rate / top:.1f}"
            for k, rate in enumerate(values)
            for at in (0, 1)
        )
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [box(right + 14, y - 9, 10, 10, colour), text(right + 30, y, name)]
    return page(title, HEIGHT, parts)


def timeline(title: str, runs: dict[str, list]) -> str:
    """Of rank 0: a row for each stream of each run, a box for each kernel."""
    names = {"product": COLOURS[4], "dispatch": COLOURS[0], "combine": COLOURS[1]}
    left, row = 190, 24
    scale = (WIDTH - left - 20) / max(s["end_ms"] for spans in runs.values() for s in spans)
    parts, y = [], TOP
    for run, spans in runs.items():
        for stream in sorted({span["stream"] for span in spans}, reverse=True):
            parts.append(text(left - 8, y + 14, f"{run}: {stream}", "end"))
            for span in (s for s in spans if s["stream"] == stream):
                x, width = span["begin_ms"] * scale, (span["end_ms"] - span["begin_ms"]) * scale
                parts.append(box(left + x, y + 3, max(width - 1, 1), 15, names[span["kind"]]))
            y += row
    for i, (name, colour) in enumerate(names.items()):
        parts += [box(left + 90 * i, y + 8, 10, 10, colour), text(left + 16 + 90 * i, y + 17, name)]
    parts.append(text(WIDTH - 20, y + 17, f"{(WIDTH - left - 20) / scale:.1f} ms", "end"))
    return page(title, y + 30, parts)


def measured(file: str, axis: str, value: str, names: dict[str, tuple[str, str]]) -> dict:
    """Series by their label, from (name, dtype) in a file of `ferry bench`."""
    results = json.loads((RESULTS / file).read_text(encoding="utf-8"))["results"]
    ticks = sorted({r[axis] for r in results if r[axis]})
    found: dict[str, list] = {}
    for label, key in names.items():
        some = [r for r in results if (r["name"], r["dtype"]) == key]
        if not some:
            raise ValueError(f"{file}: nothing of {key}")
        if axis == "sms" and not some[0]["sms"]:  # NCCL chooses its own
            some = [some[0] | {"sms": tick} for tick in ticks]
        found[label] = [(r[axis], r[value]) for r in some]
    return found


def plots() -> dict[str, str]:
    dispatch, combine = ("dispatch, cached", "bf16"), ("combine, registered", "bf16")
    throughput = {
        "dispatch, cached plan": dispatch,
        "dispatch, plan included": ("dispatch, full, exact", "bf16"),
        "combine": combine,
        "combine, expert-major": ("combine, expert-major", "bf16"),
        "NCCL all-to-all alone": ("NCCL all-to-all alone", "bf16"),
    }
    decode = {
        "dispatch, e4m3": ("latency dispatch", "e4m3"),
        "combine, a row a rank": ("latency combine, per rank", "bf16"),
        "combine, a row a slot": ("latency combine, per slot", "bf16"),
        "pair, a row a rank": ("latency pair, per rank", "e4m3"),
    }
    drawn = {}
    for gpus in (2, 4):
        machine = f"{gpus} × H200"
        drawn[f"throughput_{gpus}xh200"] = curves(
            f"Throughput mode, {machine}: logical GB/s a GPU, bf16, 4096 tokens a rank",
            "SMs of the call",
            measured(f"{gpus}xh200_exchange.json", "sms", "logical_gbps", throughput),
        )
        drawn[f"decode_{gpus}xh200"] = curves(
            f"Latency mode, {machine}: µs, median, top-8 of 256 experts, hidden 7168",
            "tokens a rank",
            measured(f"{gpus}xh200_latency.json", "tokens", "p50_us", decode),
        )
    names = {
        "copy": "copy",
        "dispatch, cached plan": "ferry dispatch, cached",
        "dispatch, plan included": "ferry dispatch, full",
        "combine": "ferry combine",
        "combine, ordinary tensor": "ferry combine, ordinary input",
        "Gloo dispatch": "Gloo dispatch",
        "Gloo combine": "Gloo combine",
    }
    of_bf16 = {label: (name, "bf16") for label, name in names.items()}
    host = measured("2core_host_exchange.json", "tokens", "logical_gbps", of_bf16)
    drawn["host_exchange"] = bars(
        "Host engine, 4 processes on 2 cores, bf16, sum over ranks",
        "GB/s",
        {name: points[0][1] for name, points in host.items()},
    )
    runs = json.loads((RESULTS / "2xh200_overlap.json").read_text(encoding="utf-8"))["runs"]
    shown = {"together": "together", "16 SMs left free": "together, own SMs"}
    drawn["overlap_2xh200"] = timeline(
        "Matrix products beside exchanges, 2 × H200, rank 0",
        {label: runs[name][0] for label, name in shown.items()},
    )
    found = json.loads((RESULTS / "8ranks_balance_loads.json").read_text(encoding="utf-8"))
    drawn["balance_loads"] = loads(
        "Slots of routes that each of 8 ranks works on, over the mean, in a training",
        {"experts where they live": found["before"], "with copies": found["after"]},
    )
    found = json.loads((RESULTS / "8ranks_elastic.json").read_text(encoding="utf-8"))
    drawn["elastic"] = deaths(
        f"New tokens a second, {found['ranks']} ranks on {found['cores']} cores",
        "rank 3 is killed",
        {
            "ferry run --elastic": found["runs"]["ferry"]["steps"],
            "torchrun, checkpoint": found["runs"]["torchrun"]["steps"],
        },
        found["tokens"],
    )
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if they differ")
    check, stale = parser.parse_args().check, []
    for name, svg in plots().items():
        path = PLOTS / f"{name}.svg"
        if not check:
            path.write_text(svg, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != svg:
            stale.append(path.relative_to(ROOT).as_posix())
    if stale:
        print(f"not up to date: {', '.join(stale)}; run python bench/plot_pages.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
