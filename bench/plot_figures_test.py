"""What plot_figures.py draws of results of this project: python3 plot_figures_test.py"""

import argparse
import json
import re
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import job
import plot_figures

RESULTS = Path(__file__).resolve().parent / "results"
STORED = {
    "balance": "2core_balance",
    "balanced_batches": "2core_balanced_batches",
    "balanced_exchange": "4xh200_balanced",
    "collectives": "2core_collectives",
    "collectives_gpu": "4xh200_collectives",
    "data_parallel": "2core_data_parallel",
    "gradient_formats": "2core_gradient_formats",
}
OTHERS = {
    "deep_ep_calls": {"figures": {"combine": {"ferry_us": 30.0, "deep_ep_us": 33.0}}},
    "compare": [
        {"name": "plan", "dtype": "bf16", "tokens": 8, "sms": 0}
        | {"before_us": 4.0, "after_us": 3.0, "ratios": [0.75]},
        {"name": "none", "dtype": "bf16", "tokens": 8, "sms": 0}
        | {"before_us": 0.0, "after_us": 3.0, "ratios": []},
    ],
}


def bars_in(svg):
    """The name of each bar, its width and the number behind it."""
    names = re.findall(r'text-anchor="end">([^<]+)</text>\n<rect[^>]* width="([\d.]+)"', svg)
    numbers = re.findall(r'text-anchor="start">([\d.]+) [^<]+</text>', svg)
    assert len(names) == len(numbers), svg
    return {name: (float(width), float(n)) for (name, width), n in zip(names, numbers)}


class Draw(unittest.TestCase):
    def test_bars_are_as_long_as_the_figures(self):
        found = {n: json.loads((RESULTS / f"{f}.json").read_text()) for n, f in STORED.items()}
        found |= OTHERS
        self.assertEqual(set(found), set(plot_figures.FIGURES))
        for program, facts in found.items():
            with self.subTest(program=program):
                values = plot_figures.FIGURES[program][2](facts)
                bars = bars_in(plot_figures.drawn(program, facts))
                self.assertEqual(list(bars), list(values))
                widest = max(width for width, _ in bars.values())
                for name, (width, number) in bars.items():
                    self.assertAlmostEqual(number, values[name], delta=0.051)
                    share = values[name] / max(values.values())
                    self.assertAlmostEqual(width / widest, share, delta=1e-3)

    def test_what_the_bars_are_of(self):
        facts = json.loads((RESULTS / "2core_collectives.json").read_text())
        first = facts["results"][0]
        self.assertEqual(
            plot_figures.of_collectives(facts)["all_reduce 1 KiB, gloo"],
            first["figures"]["gloo"]["wall_us"],
        )
        self.assertEqual(
            plot_figures.of_compare(OTHERS["compare"]), {"plan, bf16, 8 tokens, 0 SMs": 0.75}
        )

    def test_programs_write_both_files(self):
        with tempfile.TemporaryDirectory() as folder:
            parser = argparse.ArgumentParser()
            job.add_outputs(parser)
            files = [Path(folder, "a.json"), Path(folder, "a.svg")]
            words = [*("--json", str(files[0])), *("--plot", str(files[1]))]
            with mock.patch.object(sys, "argv", ["bench/compare.py"]):
                job.write(parser.parse_args(words), OTHERS["compare"])
                job.write(parser.parse_args([]), OTHERS["compare"])
            self.assertEqual(json.loads(files[0].read_text()), OTHERS["compare"])
            self.assertEqual(files[1].read_text(), plot_figures.drawn("compare", OTHERS["compare"]))


if __name__ == "__main__":
    unittest.main()
