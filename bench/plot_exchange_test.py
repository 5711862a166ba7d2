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
        "logical_gbps": 100.0,
    }


class Axes:
    """Notes what is asked of it."""

    def __init__(self):
        self.scales = {}
        self.curves = {}
        self.lines = []

    def plot(self, x, y, style="-", marker="", label=""):
        self.curves[label] = (x, y, style)

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


if __name__ == "__main__":
    unittest.main()
