"""What overlap_timeline.py makes of its runs: python3 overlap_timeline_test.py (needs no GPU)"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import overlap_timeline as overlap

KINDS = {"products": ["product"], "exchanges": ["dispatch", "combine"]}


def spans(stream, each, count):
    """`count` pieces of work of `each` milliseconds, one after another."""
    return [
        {
            "stream": stream,
            "kind": KINDS[stream][i % len(KINDS[stream])],
            "begin_ms": i * each,
            "end_ms": (i + 1) * each,
        }
        for i in range(count)
    ]


def products(each):
    return spans("products", each, 4)


def exchanges(each):
    return spans("exchanges", each, 4)


RUNS = {
    overlap.ALONE_PRODUCTS: [products(2.0), products(2.5)],
    overlap.ALONE_EXCHANGES: [exchanges(1.0), exchanges(1.0)],
    overlap.TOGETHER: [products(3.0) + exchanges(1.5), products(2.0) + exchanges(1.25)],
}


class Summary(unittest.TestCase):
    def test_the_slowest_rank_counts(self):
        alone, moved, both = overlap.summary(RUNS)
        self.assertEqual((alone["ms"], alone["products_slowdown"]), (10.0, 1.0))
        self.assertNotIn("exchanges_ms", alone)
        self.assertEqual((moved["exchanges_ms"], moved["exchanges_slowdown"]), (4.0, 1.0))
        self.assertEqual((both["ms"], both["products_slowdown"]), (12.0, 1.2))
        self.assertEqual(both["exchanges_slowdown"], 1.5)
        # One after the other 14 ms, together 12, of 4 that could be hidden.
        self.assertEqual(both["hidden"], 0.5)
        self.assertEqual((both["dispatch_ms"], both["combine_ms"]), (1.375, 1.375))

    def test_the_median_run_is_shown(self):
        runs = [[exchanges(each), exchanges(1.0)] for each in (5.0, 2.0, 3.0)]
        self.assertEqual(overlap.median_run(runs), runs[2])

    def test_table(self):
        text = overlap.table(overlap.summary(RUNS))
        self.assertIn("together", text)
        self.assertIn("50%", text)
        self.assertEqual(len(text.splitlines()), 4)

    def test_draw(self):
        settings = {"ranks": 2, "tokens": 8, "hidden": 128, "topk": 2, "experts": 4, "sms": 16}
        image = overlap.draw({"runs": RUNS, "settings": settings})
        self.assertIn("together, rank 1: exchanges", image)
        self.assertIn("<svg", image)


if __name__ == "__main__":
    unittest.main()
