"""ferry simulate: against the closed form, and what it knows beyond it. First argument: ferry."""

import json
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CLUSTER = "host_ranks: 4\nnvlink: 200\nnic: 50\n"
MODEL = "hidden: 1024\nexperts: 256\ntopk: 4\n"


class Simulate(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)
        (self.folder / "c.yaml").write_text(CLUSTER)
        (self.folder / "m.yaml").write_text(MODEL)

    def run_simulate(self, *options):
        command = [FERRY, "simulate", "--cluster", "c.yaml", "--model", "m.yaml", *options]
        return subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False
        )

    def calls(self, *options):
        done = self.run_simulate("--json", *options)
        if "built without SimGrid" in done.stderr:
            self.skipTest("built without SimGrid")
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_agrees_with_the_closed_form(self):
        """Within 2 % where nothing is congested."""
        for ranks, crossing in (
            (2, "hierarchical"),  # not every rail has a rank
            (4, "direct"),
            (16, "direct"),
            (16, "hierarchical"),
            (64, "hierarchical"),
        ):
            for call in self.calls(
                "--ranks", str(ranks), "--crossing", crossing, "--tokens", "1024"
            ):
                with self.subTest(ranks=ranks, crossing=crossing, call=call["call"]):
                    self.assertAlmostEqual(call["us"] / call["closed_form_us"], 1, delta=0.02)

    def test_hosts_as_one_take_as_long(self):
        for more in ([], ["--slow-nic", "5:0.5"], ["--leaf-hosts", "4", "--oversubscription", "2"]):
            options = ["--ranks", "64", "--tokens", "1024", *more]
            alone = self.calls(*options, "--hosts-as-one", "1")
            joined = self.calls(*options, "--hosts-as-one", "4")
            for one, other in zip(alone, joined, strict=True):
                with self.subTest(options=more, call=one["call"]):
                    self.assertAlmostEqual(other["us"] / one["us"], 1, delta=0.02)
                    self.assertEqual(other["flows"], one["flows"])

    def test_2048_ranks(self):
        """Every rail of 512 hosts, 64 of them as 8: 2,000,000 flows as 4096 a rail."""
        options = ("--ranks", "2048", "--copies", "8", "--tokens", "512")
        for call in self.calls(*options):
            self.assertAlmostEqual(call["us"] / call["closed_form_us"], 1, delta=0.02)

    def test_a_slow_nic_holds_up_its_ranks(self):
        usual = self.calls("--ranks", "16")
        slow = self.calls("--ranks", "16", "--slow-nic", "5:0.25")
        for one, other in zip(usual, slow, strict=True):
            self.assertAlmostEqual(other["us"] / one["us"], 4, delta=0.3)
            self.assertEqual(other["closed_form_us"], one["closed_form_us"])

    def test_an_oversubscribed_spine(self):
        usual = self.calls("--ranks", "32", "--leaf-hosts", "2")
        spine = self.calls("--ranks", "32", "--leaf-hosts", "2", "--oversubscription", "4")
        for one, other in zip(usual, spine, strict=True):
            # 6 of 7 other hosts are beyond the leaf switch.
            self.assertAlmostEqual(other["us"] / one["us"], 4 * 6 / 7, delta=0.15)
            self.assertEqual(other["bottleneck"], "spine")
            self.assertAlmostEqual(other["us"] / other["closed_form_us"], 1, delta=0.05)

    def test_the_dead_get_nothing(self):
        usual = self.calls("--ranks", "32")
        less = self.calls("--ranks", "32", "--dead", "0.25")
        for one, other in zip(usual, less, strict=True):
            # Two of eight hosts: 5 other hosts of 7 are left.
            self.assertAlmostEqual(other["us"] / one["us"], 5 / 7, delta=0.05)
            self.assertLess(other["flows"], one["flows"])

    def test_skew_costs_time(self):
        usual, skewed = self.calls("--ranks", "32"), self.calls("--ranks", "32", "--skew", "6")
        for one, other in zip(usual, skewed, strict=True):
            self.assertGreater(other["us"], one["us"] * 1.3)

    def test_recorded_routes(self):
        """All tokens of rank 0 go to rank 4, of the next host: one row of 1024 + 32 bytes each."""
        for rank in range(8):
            tokens = 100 if rank == 0 else 0
            ids = struct.pack("<i", 128) * 4 * tokens
            head = struct.pack("<8sIIQII", b"FERRYRT1", rank, 8, 256, tokens, 4)
            (self.folder / f"r.{rank}").write_bytes(head + ids)
        dispatch, combine = self.calls("--ranks", "8", "--routes", "r")
        self.assertEqual(dispatch["flows"], 1)
        self.assertAlmostEqual(dispatch["us"], 100 * 1056 / 50e3, places=3)
        self.assertAlmostEqual(combine["us"], 100 * 2048 / 50e3, places=3)

    def test_a_timeline(self):
        self.calls("--ranks", "8", "--timeline", "t.json")
        events = json.loads((self.folder / "t.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        # Of 8 ranks: out and in, by NVLink and NIC, dispatch and combine.
        self.assertEqual(len(spans), 8 * 4 * 2)
        first = max(span["ts"] + span["dur"] for span in spans if span["name"] == "dispatch")
        self.assertTrue(
            all(span["ts"] >= first * 0.999 for span in spans if span["name"] == "combine")
        )

    def test_refuses(self):
        self.calls("--ranks", "4")  # or skips
        for options, said in {
            ("--ranks", "512"): "--copies",
            ("--ranks", "8", "--slow-nic", "9:0.5"): "expected RANK:TIMES",
            ("--ranks", "8", "--slow-nic", "1:2"): "expected RANK:TIMES",
            ("--ranks", "8", "--slow-nic", "one"): "expected RANK:TIMES",
            ("--ranks", "8", "--slow-nic", "1:nan"): "expected RANK:TIMES",
            ("--ranks", "8", "--slow-nic", "1:1e-300"): "expected RANK:TIMES",
            ("--ranks", "6"): "6 ranks are no whole hosts of",
            ("--timeline", "/no/such/folder/t.json"): "cannot write /no/such/folder/t.json",
            ("--ranks", "8", "--oversubscription", "2"): "--leaf-hosts",
            ("--ranks", "1024", "--copies", "4", "--crossing", "direct"): "too many to simulate",
        }.items():
            done = self.run_simulate(*options)
            self.assertEqual(done.returncode, 1, options)
            self.assertIn(said, done.stderr)
        for option in ("--dead", "--skew", "--oversubscription"):
            done = self.run_simulate(option, "nan")
            self.assertEqual(done.returncode, 2, option)
            self.assertIn(f"{option}: 'nan': must be a number", done.stderr)
        head = struct.pack("<8sIIQIIi", b"FERRYRT1", 0, 1, 8, 1, 1, 0)
        (self.folder / "other.0").write_bytes(head)
        said = self.run_simulate("--routes", "other").stderr
        self.assertIn("recorded with 8 experts and top-1 routes, but the model", said)
        (self.folder / "c.yaml").write_text("host_ranks: 4\nnic: 50\n")
        self.assertIn("has no rate of NVLink", self.run_simulate("--ranks", "8").stderr)


if __name__ == "__main__":
    FERRY = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
