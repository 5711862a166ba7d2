"""ferry plan: tables, files, presets, what is refused. First argument: ferry."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

from planning_case import PAGE, RESULTS, ROOT, Case, ferry, plan, rows, run_tests


def presets(folder):
    return sorted(path.stem for path in (Path(__file__).parent / folder).glob("*.yaml"))


class Plan(Case):
    def test_names_the_bottleneck(self):
        done = plan("--ranks", "8,64")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertIn("NVLink", lines[1])
        self.assertIn("NIC", lines[3])
        self.assertIn("hierarchical", lines[3])
        self.assertNotIn("Two hosts", done.stdout)
        self.assertIn("Two hosts (16 ranks) are the least sure", plan("--ranks", "16,64").stdout)

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
            named = [[e for e, n in enumerate(call[rank]) for _ in range(n)] for call in calls]
            self.record("routes", rank, ranks, experts, named)
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
        for name, ids in (("none", []), ("unused", [-1] * 32)):
            self.record(name, 0, 1, 256, [ids], topk=8)
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
        for given in ("8,4", "4", "1,2,3"):
            self.assertIn("two numbers, the fewest first", plan("--sms", given).stderr)
        for given, said in (("nan", "must be a number"), ("-3", "at least 0"), ("inf", "at most")):
            done = plan("--reserve-gb", given)
            self.assertEqual((done.returncode, done.stdout), (2, ""), given)
            self.assertIn(f"--reserve-gb: {given!r}" if given == "nan" else given, done.stderr)
            self.assertIn(said, done.stderr)
        for option in ("--cluster", "--model"):
            said = plan(option, self.folder).stderr
            self.assertIn(f"{option}: {self.folder} is no file that can be read", said)
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
            "nic: 3\ncombine: {nic: 3}\ncombine: {nic: 4}": "line 3: combine is there twice",
            "nic: 3\n---\nnic: 4": "line 3: 2 YAML documents in the file, expected one",
            "nic: .nan": "nic is .nan, expected a number",
            "nic: " + "9" * 100000: "nic is " + "9" * 40 + "..., expected a number",
            "n\u00edc: 3": "unknown key n??c",
            "[" * 20000: "line",
            "a: &a [1, 1]\n" * 3: "line 1: unknown key a",
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
        path = f"{python.parent}:{os.environ['PATH']}"
        command = ["plan", "--ranks", "8,32", "--plot", "plan.svg"]
        done = ferry(*command, cwd=self.folder, env=os.environ | {"PATH": path})
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
            command = ["plan", "--plot", self.folder / "plan.svg"]
            done = ferry(*command, env=os.environ | {"PATH": str(place)})
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
        for rank in range(2):  # as the page's program does
            self.record("routes", rank, 2, 8, [[rank, 5] * 100])
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
            done = ferry(*command[1:], cwd=self.folder, env=given)
            missing = ("built without SimGrid", "no python3 with matplotlib")
            if not any(one in done.stderr for one in missing):
                self.assertEqual(done.returncode, 0, f"{command}\n{done.stderr}")


if __name__ == "__main__":
    run_tests()
