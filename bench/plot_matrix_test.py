"""What plot_matrix.py draws, without matplotlib: python3 plot_matrix_test.py"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plot_matrix

LINKS = {
    "domains": [0, 0, 1],
    "latency_ns": [[0, 1500, 9000], [1500, 0, 8000], [9000, 8000, 0]],
    "bytes_per_s": [[0, 3e9, 1e8], [2e9, 0, 1e8], [1e8, 1e8, 0]],
    "odd": [],
}
WAITS = {"waits_ns": [[4000, 9, 900000], [8, 0, 900000], [7, 6, 0]], "odd": ["Rank 2."]}


class Axes:
    """Notes what is asked of it."""

    def __init__(self):
        self.image, self.colours = None, ""
        self.numbers, self.borders, self.words = {}, [], {}

    def imshow(self, values, cmap, vmin):
        self.image, self.colours = values, cmap

    def text(self, x, y, words, color, **_):
        self.numbers[y, x] = (words, color)

    def axhline(self, at, **_):
        self.borders.append(at)

    def set_xlabel(self, words):
        self.words["x"] = words

    def set_ylabel(self, words):
        self.words["y"] = words

    def __getattr__(self, _):
        return lambda *_, **__: None


def drawn(panel, domains=()):
    axes = Axes()
    plot_matrix.draw(axes, panel, list(domains))
    return axes


class Draw(unittest.TestCase):
    def test_links_are_latencies_and_rates_with_borders_of_domains(self):
        latency, rate = plot_matrix.panels_of(LINKS)
        axes = drawn(latency, LINKS["domains"])
        self.assertEqual([axes.image[0][1], axes.image[0][2], axes.image[1][2]], [1.5, 9, 8])
        self.assertEqual(axes.borders, [1.5])
        self.assertEqual({i for i in range(3) if axes.image[i][i] == axes.image[i][i]}, set())
        axes = drawn(rate, LINKS["domains"])
        self.assertEqual((axes.image[0][1], axes.image[1][0]), (3000, 2000))  # row: sender
        self.assertEqual(axes.words, {"x": "to", "y": "from"})

    def test_the_bad_is_dark_and_its_number_white(self):
        latency, rate = plot_matrix.panels_of(LINKS)
        axes = drawn(latency)
        self.assertEqual((axes.colours, axes.numbers[0, 2]), ("cividis_r", ("9", "white")))
        self.assertEqual(axes.numbers[0, 1], ("1.5", "black"))
        short = [plot_matrix.short(value) for value in (101420, 0.00808, 0)]
        self.assertEqual(short, ["101k", "0.01", "0"])
        axes = drawn(rate)
        self.assertEqual((axes.colours, axes.numbers[0, 2]), ("cividis", ("100", "white")))
        self.assertNotIn((1, 1), axes.numbers)

    def test_waits_have_the_time_without_a_cpu_beside_them(self):
        waits, no_cpu = plot_matrix.panels_of(WAITS)
        self.assertEqual((drawn(waits).image[0][2], drawn(waits).image[1][0]), (900, 0.008))
        self.assertEqual(drawn(waits).words, {"x": "waited for", "y": "who waits"})
        self.assertEqual(drawn(no_cpu).image, [[4], [0], [0]])
        idle = {"waits_ns": [[0, 5], [6, 0]], "odd": []}
        self.assertEqual(len(plot_matrix.panels_of(idle)), 1)

    def test_long_waits_are_in_milliseconds(self):
        waits, no_cpu = plot_matrix.panels_of({"waits_ns": [[2e6, 105e6], [5e5, 0]]})
        self.assertEqual((waits["title"], no_cpu["title"]), ("Waits, ms", "No CPU, ms"))
        self.assertEqual((drawn(waits).image[0][1], drawn(no_cpu).image), (105, [[2], [0]]))

    def test_many_ranks_have_no_numbers(self):
        ranks = plot_matrix.NUMBERED + 1
        many = {"waits_ns": [[10.0 * i + j for j in range(ranks)] for i in range(ranks)]}
        self.assertEqual(drawn(plot_matrix.panels_of(many)[0]).numbers, {})


if __name__ == "__main__":
    unittest.main()
