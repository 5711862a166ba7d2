"""ferry plan and calibrate: tables, files, presets, what is refused. First argument: ferry."""

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "planning.md"
RESULTS = ROOT / "bench" / "results"


def plan(*options):
    return subprocess.run(
        [FERRY, "plan", *options], capture_output=True, text=True, timeout=60, check=False
    )


def rows(*options):
    done = plan("--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def presets(folder):
    return sorted(path.stem for path in (Path(__file__).parent / folder).glob("*.yaml"))


class Plan(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def file(self, text, name="file.yaml"):
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def test_names_the_bottleneck(self):
        done = plan("--ranks", "8,64")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertIn("NVLink", lines[1])
        self.assertIn("NIC", lines[3])
        self.assertIn("hierarchical", lines[3])

    def test_every_preset(self):
        for model in presets("models"):
            made = rows("--model", model, "--ranks", "8" if model == "mixtral-8x7b" else "64")
            self.assertEqual([row["fits"] for row in made], [True, True], model)
            self.assertIn("hidden:", plan("--show", model).stdout)
        for cluster in presets("clusters"):
            # h200 was measured on one host.
            load = ("4", "qwen3-30b") if cluster == "h200" else ("32,64", "deepseek-v3")
            for mode in ("throughput", "latency"):
                options = ["--cluster", cluster, "--ranks", load[0], "--model", load[1]]
                for row in rows(*options, "--mode", mode):
                    self.assertTrue(0 < row["low_us"] < row["us"] < row["high_us"])
        self.assertGreaterEqual(len(presets("clusters")), 3)

    def test_presets_repeat_published_figures(self):
        """The rates of h800 give the figures that they are from."""
        found = rows("--ranks", "8,32", "--cluster", "h800")
        for row, figure in zip(found, (153, 158, 58, 57), strict=True):
            # Over a network the source counts a copy for each of four hosts.
            bytes_ = row["received_bytes"]
            if row["ranks"] == 32:
                bytes_ *= 4 * (1 - 0.75**8) / (32 * (1 - (31 / 32) ** 8))
            self.assertAlmostEqual(bytes_ / row["us"] / 1e3 / figure, 1, delta=0.01)

    def test_a_file_of_a_cluster(self):
        cluster = self.file('{"host_ranks": 4, "nic": 40, "message_us": 1000}')
        made = rows("--cluster", cluster, "--ranks", "8")
        self.assertEqual(made[0]["bottleneck"], "messages")
        # One message to the other host; direct: one to each of its 4 ranks.
        self.assertGreater(made[0]["direct_us"], made[0]["hierarchical_us"] + 2000)

    def test_how_a_value_is_known_sets_the_interval(self):
        widths = []
        for known in ("from: measured", "from: published", "from: assumed", "error: 0.6"):
            cluster = self.file(f"host_ranks: 4\nnic: {{value: 40, {known}}}\n")
            row = rows("--cluster", cluster, "--ranks", "8")[0]
            widths.append((row["high_us"] - row["low_us"]) / row["us"])
        self.assertEqual(widths, sorted(widths))
        self.assertGreater(widths[3], widths[0] * 2)
        said = plan("--cluster", cluster, "--ranks", "8").stdout
        self.assertIn("Assumed of the cluster: nic", said)

    def test_a_section_stands_before_the_file(self):
        cluster = self.file("host_ranks: 4\nnic: 40\ncombine: {nic: 20}\n")
        first = rows("--cluster", cluster, "--ranks", "8")
        cluster = self.file("host_ranks: 4\nnic: 40\n")
        second = rows("--cluster", cluster, "--ranks", "8")
        self.assertEqual(first[0]["us"], second[0]["us"])
        self.assertAlmostEqual(first[1]["us"], second[1]["us"] * 2)

    def test_the_fewest_sms_that_are_worth_it(self):
        cluster = self.file("host_ranks: 8\nnvlink: 300\nsm_copy: 40\n")
        row = rows("--cluster", cluster, "--ranks", "8", "--model", "qwen3-235b")[0]
        # A token has 8 (1 - (7/8)^8) copies, 7/8 of them over NVLink: 300 / 40 / (7/8) SMs.
        self.assertEqual(row["num_sms"], 9)
        more = ["--cluster", cluster, "--ranks", "8", "--sms", "12,24", "--model", "qwen3-235b"]
        self.assertEqual(rows(*more)[0]["num_sms"], 12)

    def test_says_what_balance_gives(self):
        """For routes with the counts of the demo's; no other copies than it needs without skew."""
        demo = json.loads((ROOT / "tests" / "golden" / "demo_counts.json").read_text())
        ranks, experts, calls = demo["ranks"], demo["experts"], demo["calls"]
        for rank in range(ranks):
            data = b"FERRYRT1" + struct.pack("<IIQ", rank, ranks, experts)
            for call in calls:
                ids = [e for e, count in enumerate(call[rank]) for _ in range(count)]
                data += struct.pack(f"<II{len(ids)}i", len(ids) // 2, 2, *ids)
            (self.folder / f"routes.{rank}").write_bytes(data)
        given = (
            "--routes",
            str(self.folder / "routes"),
            "--model",
            self.file(f"hidden: 128\nexperts: {experts}\ntopk: 2"),
        )
        common = "--cluster", "h200", "--ranks", str(ranks), *given
        gain = rows(*common, "--balance", "2", "--copy-rows", "0")[0]["balance"]
        each = experts // ranks
        loads = [
            [sum(sum(row[r * each :][:each]) for row in call) for r in range(ranks)]
            for call in calls
        ]
        before = [max(load) * ranks / sum(load) for load in loads]
        self.assertAlmostEqual(gain["before"], sum(before) / len(before), places=6)
        self.assertAlmostEqual(gain["worst_before"], max(before), places=6)
        self.assertLessEqual(gain["worst_after"], 1.02)
        self.assertGreater(gain["copies"], 0)
        self.assertLess(gain["fetched"], gain["copies"])
        dear = rows(*common, "--balance", "2", "--copy-rows", "4096")[0]["balance"]
        self.assertEqual((dear["after"], dear["copies"]), (dear["before"], 0))
        self.assertNotIn("balance", rows(*common)[0])
        self.assertIn("after (worst)", plan(*common, "--balance", "1").stdout)
        self.assertIn("expected --routes", plan("--balance", "1").stderr)
        odd = plan("--cluster", "h200", "--ranks", "3", *given, "--balance", "1")
        self.assertIn("16 experts on 3 ranks", odd.stderr)

    def test_routes_of_no_tokens(self):
        for name, tokens, ids in (("none", 0, []), ("unused", 4, [-1] * 32)):
            data = b"FERRYRT1" + struct.pack("<IIQ", 0, 1, 256)
            data += struct.pack(f"<II{len(ids)}i", tokens, 8, *ids)
            (self.folder / f"{name}.0").write_bytes(data)
            done = plan("--routes", str(self.folder / name))
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(f"{name}: no token names an expert", done.stderr)

    def test_memory_decides_what_fits(self):
        done = plan("--ranks", "8")
        self.assertEqual(done.returncode, 1)
        self.assertIn("does not fit: on 8 ranks a GPU would hold", done.stderr)
        found = rows("--ranks", "8,64")
        self.assertEqual([row["fits"] for row in found], [False] * 2 + [True] * 2)
        # 58 layers of 4 experts of 3 matrices, a byte a number.
        self.assertEqual(found[2]["memory_bytes"]["experts"], 58 * 4 * 3 * 7168 * 2048)
        self.assertEqual(plan("--ranks", "64", "--reserve-gb", "60").returncode, 1)

    def test_writes_what_fits(self):
        path = self.folder / "tuning.json"
        self.assertEqual(plan("--ranks", "8,64", "--tuning", str(path)).returncode, 0)
        entries = json.loads(path.read_text())["entries"]
        self.assertEqual({entry["ranks"] for entry in entries}, {64})
        self.assertEqual([entry["call"] for entry in entries], ["dispatch", "combine"])
        self.assertEqual(entries[0]["crossing"], "hierarchical")
        done = plan("--tuning", str(self.folder / "no" / "such"))
        self.assertIn("cannot write", done.stderr)
        self.assertEqual(done.stdout, "")  # nothing was planned for it

    def test_refuses(self):
        self.assertIn("--copies", plan("--ranks", "512").stderr)
        self.assertIn("expected a multiple of 8", plan("--ranks", "9").stderr)
        self.assertEqual(plan("--ranks", "512", "--copies", "2").returncode, 0)
        done = plan("--model", "no-such")
        self.assertEqual(done.returncode, 1)
        self.assertIn("gpt-oss-120b", done.stderr)
        self.assertEqual(plan("--ranks", "0").returncode, 2)
        self.assertIn("fewest first", plan("--sms", "8,4").stderr)
        for text, said in {
            "host_ranks: 8\nnics: 40": "line 2: unknown key nics",
            "nic: -1": "not below 0",
            "nic: much": "nic is much, expected a number",
            "nic: {value: 3, from: hearsay}": "expected measured, published or assumed",
            "nic: {from: measured}": "has no `value`",
            "nic: {value: 3, sigma: 2}": "unknown key sigma",
            "nic: [": "line",
            "combine: {sms: 3}": "unknown key sms",
            "nic: 3\nnic: 4": "twice",
            "- nic": "expected keys and values",
        }.items():
            self.assert_refused("--cluster", text, said)

    def assert_refused(self, option, text, said):
        done = plan(option, self.file(text))
        self.assertEqual(done.returncode, 1, text)
        self.assertEqual(done.stdout, "", text)
        self.assertIn(said, done.stderr)

    def test_several_hosts_need_a_nic(self):
        done = plan("--cluster", "h200", "--ranks", "4,64", "--model", "qwen3-30b")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("--ranks 64 spans 16 hosts, but h200 has no nic for dispatch", done.stderr)
        self.assertIn("--ranks 4 at most", done.stderr)
        cluster = self.file("host_ranks: 4\ndispatch: {nic_out: 40}\n")
        self.assertIn("has no nic for combine", plan("--cluster", cluster, "--ranks", "8").stderr)
        cluster = self.file("host_ranks: 4\nnic_out: 40\n")
        self.assertEqual(len(rows("--cluster", cluster, "--ranks", "8")), 2)

    def test_a_mode_of_which_the_file_knows_nothing(self):
        """Not 0 us: calls of the other mode, and a NIC, say nothing of one host."""
        cluster = self.file("host_ranks: 4\nnic: 9\nlatency_dispatch: {latency_us: 3}\n")
        done = plan("--cluster", cluster, "--ranks", "4")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("no latency and no rate for dispatch on one host", done.stderr)
        done = plan("--cluster", cluster, "--ranks", "4", "--mode", "latency")
        self.assertIn("for latency_combine on one host", done.stderr)

    def test_values_that_no_cluster_has(self):
        whole = "expected a whole number from 1"
        sections = "and the sections dispatch, combine, latency_dispatch, latency_combine"
        for text, said in {
            "nic: 4\nhost_ranks: 0": f"line 2: host_ranks is 0, {whole}",
            "host_ranks: 7.5": f"host_ranks is 7.5, {whole}",
            "leaf_hosts: 0": f"leaf_hosts is 0, {whole}",
            "combine: {leaf_hosts: 2.5}": f"leaf_hosts is 2.5, {whole}",
            "{leaf_hosts: 4, oversubscription: 0.5}": "oversubscription is 0.5, expected from 1",
            "{contention: 0.9}": "contention is 0.9, expected from 1 to 1000",
            "contention: 1e9": "contention is 1000000000, expected from 1 to 1000",
            "{leaf_hosts: 4, oversubscription: 1e9}": "expected from 1 to 1000",
            "latency_us: 1e300": "latency_us is 1e300, expected a number, not below 0 and at most",
            "nic: 1e-300": "expected GB/s, from 1e-06",
            "nic: {value: 3, from: [a]}": "line 1: nic: from is a list or map, expected a word",
            "nic: {value: 3, [a]: 1}": "line 1: nic: a key is a list or map",
            "? [a]\n: 3": "line 1: a key is a list or map, expected a word",
            "{hidden_latency: 1}": "hidden_latency is 1, expected a share of the latency",
            "{nic: 40, oversubscription: 2}": "oversubscription for dispatch without leaf_hosts",
            "combine: {oversubscription: 2}": "oversubscription for combine without leaf_hosts",
            "nic: 45e9": "expected GB/s, from 1e-06 to 100000",
            "dispatch: {nvlink: {value: 3e5}}": "expected GB/s, from 1e-06 to 100000",
            "nic: {value: 45, error: 5}": "error is 5, expected a fraction: 0.05 is 5 %",
            "": "nothing in the file; known are host_ranks,",
            "# no more": sections,
            "nics: 40": sections,
            "dispatch:": "nothing in dispatch; known are latency_us,",
        }.items():
            self.assert_refused("--cluster", text, said)
        cluster = "host_ranks: 4\nnic: {value: 1e5, error: 1}\nleaf_hosts: 1\noversubscription: 1"
        self.assertEqual(plan("--cluster", self.file(cluster), "--ranks", "8").returncode, 0)

    def test_values_that_no_model_has(self):
        model = "hidden: 64\nexperts: {}\ntopk: {}"
        for text, said in {
            model.format(4, 5): "topk is 5 (8 unless given), more than the 4 experts",
            model.format(4.5, 2): "experts is 4.5, expected a whole number",
            model.format(4, 0): "topk is 0, expected a whole number",
            "": "nothing in the file; known are hidden, experts,",
            "experts: 64": "hidden is missing; add it",
            "hidden: 64": "experts is missing; add it",
            model.format(4, 2)
            + "\nmost_hosts: 1e10": "most_hosts is 10000000000, expected a whole",
            model.format(4, 2) + "\nmost_hosts: 0.5": "most_hosts is 0.5, expected a whole number",
        }.items():
            self.assert_refused("--model", text, said)
        fits = self.file(model.format(4, 4))
        self.assertEqual(plan("--model", fits, "--ranks", "4").returncode, 0)
        done = plan("--tokens", "0")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--tokens: 0: must be at least 1", done.stderr)

    def test_plot(self):
        """What is given to python3, which stands for the one with matplotlib."""
        python = self.folder / "bin" / "python3"
        python.parent.mkdir()
        python.write_text(
            "#!/bin/sh\n[ $# -gt 2 ] || exit 0\n"
            'printf %s "$2" > program.py\ncp "$3" given.json\necho "$5" > "$5"\n'
        )
        python.chmod(0o755)
        command = [os.path.abspath(FERRY), "plan", "--ranks", "8,32", "--plot", "plan.svg"]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.folder / "plan.svg").read_text(), "plan.svg\n")
        program = (self.folder / "program.py").read_text()
        self.assertEqual(program.strip(), (ROOT / "bench" / "plot_plan.py").read_text().strip())
        given = json.loads((self.folder / "given.json").read_text())
        self.assertEqual([entry["ranks"] for entry in given["entries"]], [8, 8, 32, 32])
        for entry in given["entries"]:
            phases = entry["phases_us"]
            self.assertEqual(phases[entry["bottleneck"]], max(phases.values()))
            parts = [us for name, us in phases.items() if name not in ("latency", "messages")]
            total = phases["latency"] + phases["messages"] + max(parts)
            self.assertAlmostEqual(total / entry["us"], 1, delta=0.04)  # fewer SMs than the most
            self.assertLessEqual(entry["low_us"], entry["us"])

    def test_no_matplotlib(self):
        """Said before anything is printed: with a python3 that has none, and without python3."""
        for python in ("#!/bin/sh\nexit 1\n", None):
            place = self.folder / ("none" if python is None else "without")
            place.mkdir()
            if python is not None:
                (place / "python3").write_text(python)
                (place / "python3").chmod(0o755)
            done = subprocess.run(
                [os.path.abspath(FERRY), "plan", "--plot", str(self.folder / "plan.svg")],
                env=os.environ | {"PATH": str(place)},
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
            self.assertIn("ferry plan: --plot: no python3 with matplotlib", done.stderr)
            self.assertIn("pip install matplotlib", done.stderr)
            self.assertFalse((self.folder / "plan.svg").exists())

    def test_ranks_that_suit_the_cluster(self):
        """Hosts by twos; of one host, where there is no network, or experts are few."""
        network = "nic: 40\nnvlink: 300\nlatency_us: 20\n"
        for cluster, model, ranks in (
            ("h800", "deepseek-v3", [16, 32, 64, 128, 256]),
            ("h800", "gpt-oss-120b", [16, 32, 64, 128]),
            ("h800", "mixtral-8x7b", [2, 4, 8]),
            (self.file("host_ranks: 2\n" + network), "qwen3-30b", [4, 8, 16, 32, 64]),
            (self.file("host_ranks: 72\n" + network, "b"), "qwen3-235b", [2, 4, 8, 16, 32, 64, 72]),
            (self.file("host_ranks: 6\nnvlink: 300\n", "c"), "qwen3-30b", [2, 4, 6]),
            (self.file("host_ranks: 1\nnvlink: 300\nlatency_us: 9\n", "d"), "qwen3-30b", [1]),
        ):
            made = rows("--cluster", cluster, "--model", model)
            self.assertEqual(sorted({row["ranks"] for row in made}), ranks, (cluster, model))

    def test_the_page_works(self):
        """Files and commands of docs/planning.md."""
        text = PAGE.read_text()
        for result in RESULTS.glob("?xh200_*.json"):
            shutil.copy(result, self.folder)
        for name, body in re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, re.DOTALL):
            self.file(body, name)
        commands = [
            shlex.split(line)
            for body in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
            for line in body.splitlines()
        ]
        self.assertGreaterEqual(len(commands), 2)
        for command in commands:
            given = dict(os.environ)
            while "=" in command[0]:
                name, _, value = command.pop(0).partition("=")
                given[name] = value
            self.assertEqual(command[0], "ferry")
            done = subprocess.run(
                [os.path.abspath(FERRY), *command[1:]],
                cwd=self.folder,
                env=given,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            missing = ("built without SimGrid", "no python3 with matplotlib")
            if not any(one in done.stderr for one in missing):
                self.assertEqual(done.returncode, 0, f"{command}\n{done.stderr}")


def calibrate(*options):
    return subprocess.run(
        [FERRY, "calibrate", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Calibrate(unittest.TestCase):
    """Rates that are known, and this project's own measurements."""

    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

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

    def test_the_page_has_what_own_gpus_give(self):
        names = [
            f"{n}xh200_{what}.json" for what in ("exchange", "tokens", "latency") for n in "24"
        ]
        names.append("2xh200_overlap.json")
        out = self.folder / "h200.yaml"
        done = calibrate(*(RESULTS / name for name in names), "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(done.stdout, PAGE.read_text(), f"the page has another table: {done.stdout}")
        preset = Path(__file__).parent / "clusters" / "h200.yaml"
        self.assertEqual(out.read_text(), preset.read_text())
        held = covered = within = 0
        for line in done.stdout.splitlines()[-4:]:
            cells = [cell.strip() for cell in line.split("|")]
            held += int(cells[2])
            covered += int(cells[4])
            self.assertLessEqual(float(cells[6]), 5, line)
            within += int(cells[3])
        self.assertGreaterEqual(covered, 0.9 * held)
        self.assertGreaterEqual(within, held - 2)  # dispatches of one token; the page says so


if __name__ == "__main__":
    FERRY = sys.argv.pop(1)
    unittest.main()
