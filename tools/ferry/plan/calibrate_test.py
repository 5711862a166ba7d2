"""ferry calibrate: fits, what is refused, and the page's table. First argument: ferry."""

import json
import re
from pathlib import Path

from planning_case import PAGE, RESULTS, Case, calibrate, plan, rows, run_tests


class Calibrate(Case):
    """Rates that are known, and this project's own measurements."""

    def bench(self, calls, name="dispatch, full, worst case", **settings):
        """A file as of ferry bench; calls: tokens, SMs, microseconds, bytes copied and sent."""
        results = [
            {
                "name": name,
                "dtype": "bf16",
                "tokens": tokens,
                "sms": sms,
                "p50_us": us,
                "row_bytes": 4096,
                "logical_bytes": copied * 4,
                "wire_bytes": sent * 4,
            }
            for tokens, sms, us, copied, sent in calls
        ]
        known = {"ranks": 4, "routes": "uniform", "topk": 8, "crossing": "automatic"}
        path = self.folder / "bench.json"
        path.write_text(
            json.dumps({"settings": known | settings, "results": results, "machine": {}})
        )
        return path

    def test_finds_rates_that_are_known(self):
        """10 us, 40 GB/s of an SM, 250 GB/s of NVLink."""
        calls = []
        for tokens in (1, 64, 512, 4096):
            for sms in (2, 4, 16):
                copied, sent = tokens * 40000, tokens * 30000
                us = 10 + max(copied / 40e3 / sms, sent / 250e3)
                calls.append((tokens, sms, us, copied, sent))
        out = self.folder / "made.yaml"
        done = calibrate(self.bench(calls), "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        values = dict(re.findall(r"  (\w+): {value: ([0-9.e+-]+)", out.read_text()))
        for key, value in {"latency_us": 10, "sm_copy": 40, "nvlink": 250}.items():
            self.assertAlmostEqual(float(values[key]) / value, 1, delta=0.01, msg=key)
        self.assertEqual(done.stdout.count("| fitted |"), 5)
        self.assertIn("| dispatch | 7 | 7 | 7 |", done.stdout)
        out.write_text(out.read_text() + "combine: {latency_us: 1}\n")
        self.assertEqual(
            rows("--cluster", str(out), "--ranks", "4", "--model", "qwen3-30b")[0]["num_sms"], 9
        )

    def test_finds_the_rates_of_latency_mode(self):
        """12 us, 7 of few tokens, 400 GB/s of copies to experts, 250 of NVLink."""
        calls = []
        for tokens in (1, 4, 8, 12, 24, 48, 128, 512):
            sent = tokens * 4096 * 2.7 if tokens % 3 == 0 else tokens * 4096
            us = (
                (7 if tokens <= 8 else 12) ** 1.5
                + (tokens * 8 * 4096 / 400e3 + sent / 250e3) ** 1.5
            ) ** (2 / 3)
            calls.append((tokens, 0, us, tokens * 4096, sent))
        out = self.folder / "made.yaml"
        done = calibrate(self.bench(calls, "latency dispatch"), "--points", "6", "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        values = dict(re.findall(r"  (\w+): {value: ([0-9.e+-]+)", out.read_text()))
        known = {"latency_us": 12, "few_latency_us": 7, "copy": 400, "nvlink": 250}
        for key, value in known.items():
            self.assertAlmostEqual(float(values[key]) / value, 1, delta=0.02, msg=key)
        self.assertIn("| latency_dispatch | 2 | 2 | 2 |", done.stdout)
        out.write_text(out.read_text() + "latency_combine: {latency_us: 1}\n")
        options = (
            "--cluster",
            str(out),
            "--ranks",
            "4",
            "--model",
            "qwen3-30b",
            "--mode",
            "latency",
        )
        for tokens, least in (("8", 7), ("9", 12)):
            self.assertGreaterEqual(rows(*options, "--tokens", tokens)[0]["us"], least)
        self.assertLess(rows(*options, "--tokens", "8")[0]["us"], 8)

    def test_finds_the_floor_of_a_latency_combine(self):
        """12 us, a third of it while rows move; up to 8 tokens 6 us and 0.2 of each."""
        calls = []
        for tokens in (1, 4, 8, 12, 24, 48, 128, 512):
            copies, sent = tokens * 8 * 4096, tokens * 4096 * (2 if tokens % 3 == 0 else 1)
            latency = 6 + 0.2 * tokens if tokens <= 8 else 12
            us = max(latency, latency * 2 / 3 + max(copies / 1500e3, sent / 200e3))
            calls.append((tokens, 0, us, tokens * 4096, sent))
        out = self.folder / "made.yaml"
        done = calibrate(self.bench(calls, "latency combine, per rank"), "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| latency_combine | 3 | 3 | 3 |", done.stdout)
        values = dict(re.findall(r"  (\w+): {value: ([0-9.e+-]+)", out.read_text()))
        for key, value in {"few_latency_us": 6, "few_token_us": 0.2, "nvlink": 200}.items():
            self.assertAlmostEqual(float(values[key]) / value, 1, delta=0.02, msg=key)
        out.write_text(out.read_text() + "latency_dispatch: {latency_us: 1}\n")
        options = "--cluster", str(out), "--ranks", "4", "--model", "qwen3-30b", "--mode", "latency"
        self.assertAlmostEqual(rows(*options, "--tokens", "2")[1]["us"], 6.4, delta=0.1)
        self.assertAlmostEqual(rows(*options, "--tokens", "9")[1]["us"], 12, delta=0.5)

    def test_beside_products(self):
        timeline = self.folder / "timeline.json"
        alone = {"name": "exchanges alone", "dispatch_ms": 2.0, "combine_ms": 4.0}
        beside = {"name": "together, own SMs", "dispatch_ms": 2.4, "combine_ms": 3.9}
        timeline.write_text(json.dumps({"summary": [alone, beside]}))
        calls = [(t, 16, 10 + t, t * 40000, t * 30000) for t in (1, 2, 4, 8, 16, 32, 64, 128)]
        out = self.folder / "made.yaml"
        self.assertEqual(calibrate(self.bench(calls), timeline, "--out", out).returncode, 0)
        self.assertIn("contention: {value: 1.200, from: measured}", out.read_text())
        out.write_text(out.read_text() + "combine: {latency_us: 1, contention: 1}\n")
        options = "--cluster", str(out), "--ranks", "4", "--model", "qwen3-30b"
        took = [rows(*options, *more)[0]["us"] for more in ((), ("--beside-products",))]
        self.assertAlmostEqual((took[1] - 10) / (took[0] - 10), 1.2, delta=0.01)
        said = plan("--beside-products", "--cluster", "h100", "--ranks", "16").stderr
        self.assertIn("h100 has no contention for dispatch", said)
        timeline.write_text(json.dumps({"summary": [alone]}))
        self.assertIn("could not tell products to leave SMs", calibrate(timeline).stderr)

    def test_a_call_that_does_not_fit_is_a_miss(self):
        calls = [(t, 16, 10 + t, t * 40000, t * 30000) for t in (1, 2, 4, 8, 16, 32, 64, 128)]
        calls[4] = (16, 16, 200, 16 * 40000, 16 * 30000)
        done = calibrate(self.bench(calls), "--points", "5")
        self.assertIn("**miss**", done.stdout)

    def test_errors_of_a_fit_that_misses_are_written(self):
        """Nine of ten calls are within them; the interval of ferry plan has them, too."""
        calls = [(t, 16, 10 + t, t * 40000, t * 30000) for t in (1, 2, 4, 8, 16, 32, 64, 128)]
        calls[4] = (16, 16, 50, 16 * 40000, 16 * 30000)
        out = self.folder / "made.yaml"
        done = calibrate(self.bench(calls), "--out", out)
        errors = sorted(
            abs(float(line.split("|")[8]))
            for line in done.stdout.splitlines()
            if line.startswith("| dispatch | 4")
        )
        written = re.findall(r"latency_us: .* error: ([0-9.]+)}", out.read_text())
        self.assertEqual(len(errors), 8)
        self.assertAlmostEqual(float(written[0]) * 100, errors[7], delta=1)  # of 8 calls, 8
        self.assertEqual(out.read_text().count(f"error: {written[0]}"), out.read_text().count("{"))
        self.assertGreater(float(written[0]), 0.05)

    def test_says_that_nothing_checks_a_fit(self):
        """One call fits any rates exactly: they are as if assumed."""
        out = self.folder / "made.yaml"
        done = calibrate(self.bench([(128, 16, 100, 9000, 7000)]), "--out", out)
        self.assertIn("Nothing checks the fit of dispatch: all of its calls (1)", done.stderr)
        self.assertIn("| dispatch | 0 | - | - | - | - |", done.stdout)
        self.assertEqual(out.read_text().count("error: 0.30"), out.read_text().count("{"))

    def test_no_latency_is_none(self):
        calls = [(t, s, t * 40 / s, t * 40000, 3) for t in (64, 512, 4096) for s in (2, 4)]
        out = self.folder / "made.yaml"
        self.assertEqual(calibrate(self.bench(calls), "--out", out).returncode, 0)
        self.assertIn("latency_us: {value: 0, from: measured}", out.read_text())

    def test_says_where_no_nic_was_fitted(self):
        calls = [(t, 16, 10 + t, t * 40000, t * 30000) for t in (1, 2, 4, 8, 16, 32)]
        said = calibrate(self.bench(calls)).stderr
        self.assertIn("No nic was fitted for dispatch: no call crosses hosts", said)
        across = {"domain_size": 2, "crossing": "hierarchical"}
        self.assertEqual(calibrate(self.bench(calls, **across)).stderr, "")
        # Three points: one that carries least, two that carry most; none of them crosses.
        crossing = self.bench([(64, 16, 100, 9, 9)], **across).rename(self.folder / "across.json")
        calls = [(t, s, 10 + t, t * 40000, t * 30000) for t in (1, 512, 4096) for s in (8, 16)]
        said = calibrate(self.bench(calls), crossing, "--points", "3").stderr
        self.assertIn("no point crosses hosts and waits for it; take more --points", said)

    def test_links_between_domains_give_the_nic(self):
        path = self.folder / "net.json"
        rates = [
            [0 if a == b else 9e9 if a // 2 == b // 2 else 3e9 for b in range(4)] for a in range(4)
        ]
        path.write_text(json.dumps({"ranks": 4, "domains": [0, 0, 1, 1], "bytes_per_s": rates}))
        out = self.folder / "made.yaml"
        self.assertEqual(calibrate(path, "--out", out).returncode, 0)
        self.assertIn("nic: {value: 3, from: measured", out.read_text())
        self.assertIn("host_ranks: 2", out.read_text())

    def test_refuses(self):
        path = self.folder / "other.json"
        path.write_text('{"results": [{}]}')
        self.assertIn("not of `ferry bench --json`", calibrate(path).stderr)
        self.assertNotIn("json.exception", calibrate(path).stderr)
        path.write_text("no JSON")
        self.assertIn("not of `ferry bench --json`", calibrate(path).stderr)
        self.assertNotIn("json.exception", calibrate(path).stderr)
        tuning = self.folder / "tuning.json"
        self.assertEqual(plan("--ranks", "64", "--tuning", str(tuning)).returncode, 0)
        self.assertIn("expected `settings` and `results`, or `domains`", calibrate(tuning).stderr)
        self.assertIn("cannot be read", calibrate(self.folder / "none.json").stderr)
        calls = self.bench([(1, 1, 5, 4096, 4096)], domain_size=2)
        self.assertIn("--crossing direct or hierarchical", calibrate(calls).stderr)
        self.assertIn("nothing to calibrate", calibrate(self.bench([])).stderr)

    def test_numbers_that_no_machine_has(self):
        good = {"tokens": 64, "sms": 8, "p50_us": 9.0, "row_bytes": 4096, "logical_bytes": 1e6}
        wrong = {
            "tokens": (0, -1, 1.5, 1e300),
            "sms": (-1, 1e9),
            "p50_us": (0, -1, 1e300),
            "row_bytes": (0, -1, 1e300),
            "logical_bytes": (-1, 1e300),
            "wire_bytes": (-1, 1e300),
            "ranks": (0, -1, 1e9),
            "topk": (0, 1e9),
            "domain_size": (-1, 0.5),
        }
        path = self.folder / "bench.json"
        for key, values in wrong.items():
            for value in values:
                call = good | {"name": "dispatch, full", "dtype": "bf16", "wire_bytes": 1e6}
                settings = {"ranks": 4, "topk": 8}
                (settings if key in ("ranks", "topk", "domain_size") else call)[key] = value
                path.write_text(
                    json.dumps({"settings": settings, "results": [call], "machine": {}})
                )
                done = calibrate(path)
                self.assertEqual(done.returncode, 1, (key, value))
                self.assertRegex(done.stderr, rf"bench.json: {key} is .*, expected")
        for rate in (-1, 0, 1e300):
            path.write_text(json.dumps({"domains": [0, 1], "bytes_per_s": [[0, rate], [rate, 0]]}))
            self.assertIn("a rate of bytes_per_s is", calibrate(path).stderr)
        alone = {"name": "exchanges alone", "dispatch_ms": 2.0, "combine_ms": 4.0}
        for us in (0, -1):
            beside = {"name": "together, own SMs", "dispatch_ms": us, "combine_ms": 3.9}
            path.write_text(json.dumps({"summary": [alone, beside]}))
            self.assertIn("dispatch_ms is", calibrate(path).stderr)

    def test_says_which_value_is_of_another_kind(self):
        good = json.loads(self.bench([(64, 8, 9.0, 4096, 4096)]).read_text())
        path = self.folder / "bench.json"

        def said(**changed):
            path.write_text(json.dumps(good | changed))
            done = calibrate(path)
            self.assertEqual((done.returncode, done.stdout), (1, ""), changed)
            self.assertIn(f"{path}: ", done.stderr)
            return done.stderr

        call = good["results"][0]
        for key, value, expected in (
            ("p50_us", None, "p50_us is null, expected a number from 0.001"),
            ("p50_us", "x" * 99, 'p50_us is "' + "x" * 39 + "..., expected a number"),
            ("sms", [], "sms is [], expected a number from 0 to 1024"),
            ("name", 3, "name is 3, expected a word"),
            ("dtype", {}, "dtype is {}, expected a word"),
        ):
            self.assertIn(expected, said(results=[call | {key: value}]))
        del call["tokens"]
        self.assertIn("`tokens` is missing", said())
        self.assertIn("results is 3, expected a list", said(results=3))
        self.assertIn("`name` is 3, expected keys and values", said(results=[3]))
        self.assertIn("`ranks` is 3, expected keys and values", said(results=[], settings=3))
        good["results"] = []
        for gpus, expected in (
            ({"all": 3}, "all is 3, expected a list"),
            ({"all": [{"memory_bytes": -1}]}, "memory_bytes is -1, expected a number"),
            (
                {"all": [{"memory_bytes": 1, "multiprocessors": 1e300}]},
                "multiprocessors is 1e+300, expected a number from 0 to 1024",
            ),
        ):
            self.assertIn(expected, said(machine={"gpus": gpus}))
        for text, expected in {
            '{"domains": [0, 1e300], "bytes_per_s": []}': "one of domains is 1e+300, expected",
            '{"domains": [0, 1], "bytes_per_s": [[1, 2]]}': "expected 2 lists of 2 rates",
            '{"domains": [0, 1], "bytes_per_s": 3}': "bytes_per_s is 3, expected a list",
            '{"summary": [{"name": 3}]}': "name is 3, expected a word",
        }.items():
            path.write_text(text)
            self.assertIn(expected, calibrate(path).stderr)
        self.assertIn(f"{self.folder}: cannot be read", calibrate(self.folder).stderr)
        unwritable = calibrate(path, "--out", "/no/such/folder/x").stderr
        self.assertIn("ferry calibrate: cannot write /no/such/folder/x", unwritable)

    def test_the_search_ends_where_nothing_fits(self):
        """Errors of more than their own size, and rates that no call waits for."""
        calls = [
            (t, 0, us, 262144 * t, 131072 * t)
            for t, us in ((1, 22), (4, 90), (16, 7), (64, 150), (128, 14), (256, 400))
        ]
        self.assertEqual(calibrate(self.bench(calls)).returncode, 0)

    def test_rates_that_no_call_waits_for_are_left_out(self):
        """The file that is made can be read: calls of one time have no rate."""
        calls = [(t, 0, 10, t * 4096, t * 2048) for t in (16, 32, 64, 128, 256, 512)]
        out = self.folder / "made.yaml"
        done = calibrate(self.bench(calls, "latency dispatch"), "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        out.write_text(out.read_text() + "latency_combine: {latency_us: 1}\n")
        options = "--cluster", str(out), "--ranks", "4", "--model", "qwen3-30b", "--mode", "latency"
        self.assertAlmostEqual(rows(*options)[0]["us"], 10, delta=0.1)

    def test_contention_without_a_section_is_said(self):
        rates = self.folder / "net.json"
        rates.write_text(json.dumps({"domains": [0, 1], "bytes_per_s": [[0, 3e9], [3e9, 0]]}))
        timeline = self.folder / "timeline.json"
        lines = [
            {"name": name, "dispatch_ms": 2.0, "combine_ms": 4.0}
            for name in ("exchanges alone", "together, own SMs")
        ]
        timeline.write_text(json.dumps({"summary": lines}))
        done = calibrate(rates, timeline)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("The contention of dispatch, 1.000, is left out", done.stderr)

    def own(self, machine, counts, *more):
        """Not fitted, within 10 % and within the interval: of this machine's files, whose table the
        page has. The median of each call is within 5 %."""
        kinds = ("exchange", "tokens", "latency")
        names = [f"{n}x{machine}_{kind}.json" for kind in kinds for n in counts]
        done = calibrate(
            *(RESULTS / name for name in (*names, *more)), "--out", self.folder / "out"
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(done.stdout, PAGE.read_text(), f"the page has another table: {done.stdout}")
        sums = [0, 0, 0]
        for line in done.stdout.splitlines()[-4:]:
            cells = [cell.strip() for cell in line.split("|")]
            sums = [total + int(cell) for total, cell in zip(sums, cells[2:5], strict=True)]
            self.assertLessEqual(float(cells[6]), 5, line)
        return sums

    def test_the_page_has_what_own_gpus_give(self):
        held, within, covered = self.own("h200", (2, 4), "2xh200_overlap.json")
        self.assertEqual(within, held - 2)  # dispatches of one token; the page says so
        preset = Path(__file__).parent / "clusters" / "h200.yaml"
        self.assertEqual((self.folder / "out").read_text(), preset.read_text())
        blind = self.own("h100", (4,))
        self.assertEqual(blind[1], blind[0])
        text = PAGE.read_text()
        others = re.search(r"(\d+) of (\d+) figures that were not fitted are within", text)
        covered += blind[2] + int(others[1])
        held += blind[0] + int(others[2])
        self.assertGreaterEqual(covered, 0.9 * held)
        self.assertIn(f"all hold-outs of this page together, {covered} of {held}", text)


if __name__ == "__main__":
    run_tests()
