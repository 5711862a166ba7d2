"""What compare.py makes of two builds' reports: python3 compare_test.py"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare


def report(**times):
    line = {"dtype": "bf16", "tokens": 8, "sms": 0}
    return {"results": [line | {"name": name, "p50_us": us} for name, us in times.items()]}


class Compared(unittest.TestCase):
    def test_the_least_median_of_all_rounds_counts(self):
        before = [report(plan=10.0, gone=1.0), report(plan=20.0, gone=1.0)]
        after = [report(plan=15.0, new=1.0), report(plan=12.0, new=1.0)]
        (plan,) = compare.compared(before, after)
        self.assertEqual((plan["before_us"], plan["after_us"]), (10.0, 12.0))
        self.assertEqual(plan["ratios"], [1.5, 0.6])
        self.assertIn("1.200  (0.600 - 1.500)", compare.table([plan]))

    def test_a_case_that_took_no_time_has_no_ratio(self):
        (pair,) = compare.compared([report(pair=0.0)], [report(pair=1.0)])
        self.assertEqual(pair["ratios"], [])
        self.assertIn("-", compare.table([pair]))


if __name__ == "__main__":
    unittest.main()
