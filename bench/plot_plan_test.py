"""What plot_plan.py draws, without matplotlib: python3 plot_plan_test.py"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plot_plan


def entry(call, ranks, us, **phases):
    return {
        "call": call,
        "dtype": "bf16",
        "ranks": ranks,
        "us": us,
        "low_us": us * 0.8,
        "high_us": us * 1.3,
        "phases_us": {"latency": 0, "NVLink out": 0, "NIC out": 0} | phases,
    }


class Axes:
    """Notes what is asked of it."""

    def __init__(self):
        self.curves, self.bands, self.ticks = {}, [], {}
        self.image = None

    def plot(self, x, y, label="", **_):
        self.curves[label] = (x, y)

    def fill_between(self, x, low, high, **_):
        self.bands.append((x, low, high))

    def imshow(self, values, **_):
        self.image = values

    def set_xticks(self, places, names=None, **_):
        self.ticks["x"] = names or places

    def set_yticks(self, places, names=None, **_):
        self.ticks["y"] = names or places

    def __getattr__(self, _):
        return lambda *_, **__: None


class Draw(unittest.TestCase):
    entries = (
        entry("combine", 64, 200.0, **{"NIC out": 150.0}),
        entry("combine", 8, 100.0, **{"NVLink out": 100.0}),
        entry("dispatch", 8, 50.0, **{"NVLink out": 25.0}),
    )

    def test_times_over_ranks_with_their_intervals(self):
        axes = Axes()
        plot_plan.draw_times(axes, self.entries)
        self.assertEqual(axes.curves["combine bf16"], ([8, 64], [100.0, 200.0]))
        self.assertEqual(axes.curves["dispatch bf16"], ([8], [50.0]))
        self.assertEqual(axes.bands[0], ([8, 64], [80.0, 160.0], [130.0, 260.0]))
        self.assertEqual(axes.ticks["x"], [8, 64])

    def test_how_busy_links_are(self):
        axes = Axes()
        plot_plan.draw_links(axes, self.entries)
        self.assertEqual(axes.ticks["y"], ["NVLink out", "NIC out"])  # no line without bytes
        self.assertEqual(axes.ticks["x"], ["combine 64", "combine 8", "dispatch 8"])
        self.assertEqual(axes.image, [[0, 1, 0.5], [0.75, 0, 0]])


if __name__ == "__main__":
    unittest.main()
