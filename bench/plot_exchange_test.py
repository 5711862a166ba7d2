"""What plot_exchange.py draws, without matplotlib: python3 plot_exchange_test.py"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plot_exchange


def line(name, tokens, sms, row_bytes=512, dtype="bf16"):
    return {
        "name": name,
        "dtype": dtype,
        "tokens": tokens,
        "sms": sms,
        "row_bytes": row_bytes,
        "p50_us": 10.0 * tokens,
        "p95_us": 12.0 * tokens,
        "logical_gbps": 100.0 if row_bytes else 0.0,
    }


class Axes:
    """Notes what is asked of it."""

    def __init__(self):
        self.scales = {}
        self.curves = {}
        self.lines = []
        self.looks = []
        self.bars = self.names = None

    def plot(self, x, y, style="-", marker="", label="", color=""):
        self.curves[label] = (x, y, style)
        self.looks.append((color, marker))

    def barh(self, places, values, color, xerr):
        self.bars = (list(values), xerr[1])

    def set_yticks(self, places, names):
        self.names = names

    def axhline(self, y, label="", **_):
        self.lines.append(label)

    def set_xscale(self, name, **_):
        self.scales["x"] = name

    def set_yscale(self, name, **_):
        self.scales["y"] = name

    def __getattr__(self, _):
        return lambda *_, **__: None


class Draw(unittest.TestCase):
    lines = (
        line("plan", 1, 24, 0),
        line("plan", 16, 24, 0),
        line("dispatch, cached", 16, 24),
        line("dispatch, cached", 1, 24),
        line("NCCL all-to-all alone", 1, 0),
        line("NCCL all-to-all alone", 16, 0),
    )

    def test_time_over_tokens_is_log_log_and_shows_the_plan(self):
        axes = Axes()
        plot_exchange.draw(axes, list(self.lines), "tokens", "p50_us")
        self.assertEqual(axes.scales, {"x": "log", "y": "log"})
        self.assertEqual(axes.curves["plan"], ([1, 16], [10.0, 160.0], "-"))
        self.assertEqual(axes.curves["dispatch, cached, bf16"][0], [1, 16])
        self.assertEqual(axes.curves["NCCL all-to-all alone, bf16"][2], "--")

    def test_rates_over_tokens_are_linear_and_without_the_plan(self):
        axes = Axes()
        plot_exchange.draw(axes, list(self.lines), "tokens", "logical_gbps")
        self.assertEqual(axes.scales, {"x": "log"})
        self.assertNotIn("plan", axes.curves)

    def test_over_sms_nccl_is_a_line_across(self):
        axes = Axes()
        lines = [line("dispatch, cached", 16, sms) for sms in (8, 1, 3)]
        plot_exchange.draw(axes, [*lines, line("NCCL all-to-all alone", 16, 0)], "sms", "p50_us")
        self.assertEqual(axes.curves["dispatch, cached, bf16"][0], [1, 3, 8])
        self.assertEqual(axes.lines, ["NCCL all-to-all alone, bf16"])
        self.assertEqual(axes.scales, {})

    def test_many_curves_are_told_apart_without_colour(self):
        axes = Axes()
        lines = [line(f"call {i:02}", 16, sms) for i in range(20) for sms in (8, 16)]
        plot_exchange.draw(axes, lines, "sms", "logical_gbps")
        self.assertEqual(len(set(axes.looks)), 20)
        for (colour, marker), (other, after) in zip(axes.looks, axes.looks[1:]):
            self.assertTrue(colour != other and marker != after)

    def test_one_measurement_of_each_call_is_a_bar(self):
        lines = [line("plan", 16, 0, 0), line("dispatch", 16, 0), line("latency dispatch", 2, 0)]
        axes = Axes()
        plot_exchange.draw_bars(axes, lines, "p50_us")
        self.assertEqual(axes.bars, ([160.0, 160.0, 20.0], [32.0, 32.0, 4.0]))
        self.assertEqual(axes.names[2], "latency dispatch, bf16, 2 tokens")
        plot_exchange.draw_bars(axes, lines, "logical_gbps")
        self.assertEqual(axes.bars, ([100.0, 100.0], [0, 0]))  # a plan moves no rows


if __name__ == "__main__":
    unittest.main()
