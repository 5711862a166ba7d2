"""`ferry bench` of two builds in one run, in turn: times before and after, and their ratio.

    python bench/compare.py BEFORE AFTER [--rounds 5] [--json FILE] [--plot FILE] [-- OPTION...]

BEFORE and AFTER: the programs. OPTION: of `ferry bench`, for both. Every other round the other one
is first. Of each line the least median of all rounds counts, which other work on the machine
disturbs least; in brackets the ratios of the rounds. `make compare BASE=COMMIT` builds both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import job

Key = tuple[str, str, int, int]


def times_of(report: dict) -> dict[Key, float]:
    """Median microseconds of each line."""
    return {
        (line["name"], line["dtype"], line["tokens"], line["sms"]): line["p50_us"]
        for line in report["results"]
    }


def compared(before: list[dict], after: list[dict]) -> list[dict]:
    """A record for each line that both have; reports of round i side by side."""
    rounds = [(times_of(a), times_of(b)) for a, b in zip(before, after, strict=True)]
    records = []
    for key in rounds[0][0]:
        if not all(key in times for pair in rounds for times in pair):
            continue
        ratios = [b[key] / a[key] for a, b in rounds if a[key] > 0]
        least = [min(pair[side][key] for pair in rounds) for side in (0, 1)]
        records.append(
            dict(zip(("name", "dtype", "tokens", "sms"), key))
            | {"before_us": least[0], "after_us": least[1], "ratios": ratios}
        )
    return records


def table(records: list[dict]) -> str:
    """For people."""
    lines = [f"{'':<30}{'dtype':>6}{'tokens':>8}{'SMs':>5}{'before us':>12}{'after us':>12}{'':>7}"]
    for r in records:
        ratio = f"{r['after_us'] / r['before_us']:.3f}" if r["before_us"] > 0 else "-"
        spread = f"({min(r['ratios']):.3f} - {max(r['ratios']):.3f})" if r["ratios"] else ""
        lines.append(
            f"{r['name']:<30}{r['dtype']:>6}{r['tokens']:>8}{r['sms'] or '-':>5}"
            f"{r['before_us']:>12.1f}{r['after_us']:>12.1f}{ratio:>7}  {spread}"
        )
    return "\n".join(lines)


def measured(program: Path, options: list[str]) -> dict:
    """What it reports."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [str(program), "bench", *options, "--json", str(file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"compare: exit code {done.returncode} of {' '.join(command)}")
        return json.loads(file.read_text())


def main() -> int:
    own, options = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, options = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    job.add_outputs(parser)
    args = parser.parse_args(own)
    programs = (args.before.resolve(), args.after.resolve())
    found: tuple[list[dict], list[dict]] = ([], [])
    for round_ in range(args.rounds):
        for side in (0, 1) if round_ % 2 == 0 else (1, 0):
            found[side].append(measured(programs[side], options))
    records = compared(*found)
    print(table(records))
    job.write(args, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
