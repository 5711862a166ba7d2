"""What plot_pages.py draws, read back by the labels of the axis: python3 plot_pages_test.py"""

import json
import re
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plot_pages


def lines_in(svg):
    """Of each line its heights, by the numbers at the left, of the panel that it lies in."""
    at = plot_pages.LEFT - 6
    labels = re.findall(rf'<text x="{at:.1f}" y="([\d.]+)" text-anchor="end">([\d.]+)</text>', svg)
    panels: list[list[tuple[float, float]]] = []
    for y, number in labels:
        if number == "0":
            panels.append([])
        panels[-1].append((float(y) - 4, float(number)))
    found = []
    for way in re.findall(r'<polyline points="([^"]+)"', svg):
        heights = [float(point.split(",")[1]) for point in way.split()]
        (bottom, _), (top, most) = next(
            (p[0], p[-1]) for p in panels if p[-1][0] - 1 <= min(heights) <= p[0][0] + 1
        )
        found.append([(bottom - height) / (bottom - top) * most for height in heights])
    return found


class Lines(unittest.TestCase):
    def expect_lines(self, svg, wanted, delta):
        found = lines_in(svg)
        self.assertEqual(len(found), len(wanted))
        for line, values in zip(found, wanted):
            self.assertEqual(len(line), len(values))
            for got, value in zip(line, values):
                self.assertAlmostEqual(got, value, delta=delta)

    def test_curves_are_the_figures(self):
        series = {"a": [(1, 10.0), (8, 320.0), (64, 95.5)], "b": [(8, 0.0)]}
        svg = plot_pages.curves("title", "tokens", series)
        self.expect_lines(svg, [[10.0, 320.0, 95.5], [0.0]], delta=0.1)

    def test_loads_are_shares_of_the_mean_in_panels_of_one_scale(self):
        panels = {"before": [[1, 3], [2, 2], [0, 4]], "after": [[2, 2], [3, 2], [2, 2]]}
        svg = plot_pages.loads("title", panels)
        wanted = [[0.5, 1, 0], [1.5, 1, 2], [1, 1.2, 1], [1, 0.8, 1]]
        self.expect_lines(svg, wanted, delta=0.01)

    def test_rates_around_a_death_are_tokens_over_time(self):
        steps = [[-4.0, 1, 8], [0.0, 2, 8], [2.0, 3, 7], [8.0, 4, 7]]  # time, step, ranks
        svg = plot_pages.deaths("title", "death", {"ferry": steps}, 1200)
        rates = [300.0] * 16 + [600.0] * 8 + [200.0] * 24  # of windows of 0.25 s
        self.expect_lines(svg, [[rate for rate in rates for _ in (0, 1)]], delta=1.0)

    def test_pages_show_what_was_measured(self):
        drawn = plot_pages.plots()
        file = plot_pages.RESULTS / "4xh200_exchange.json"
        results = json.loads(file.read_text(encoding="utf-8"))["results"]
        wanted = sorted(
            (r["sms"], r["logical_gbps"])
            for r in results
            if (r["name"], r["dtype"]) == ("dispatch, cached", "bf16")
        )
        found = lines_in(drawn["throughput_4xh200"])[0]
        self.assertEqual(len(found), len(wanted))
        for got, (_, rate) in zip(found, wanted):
            self.assertAlmostEqual(got, rate, delta=1.0)


if __name__ == "__main__":
    unittest.main()
