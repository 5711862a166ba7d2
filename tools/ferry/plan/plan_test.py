"""ferry plan: the table, files in place of presets, and what is refused. First argument: ferry."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "planning.md"


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
            for mode in ("throughput", "latency"):
                for row in rows("--cluster", cluster, "--ranks", "32,64", "--mode", mode):
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
        self.assertIn("cannot be written", done.stderr)

    def test_refuses(self):
        self.assertIn("--copies", plan("--ranks", "512").stderr)
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
            done = plan("--cluster", self.file(text))
            self.assertEqual(done.returncode, 1, text)
            self.assertIn(said, done.stderr)

    def test_the_page_works(self):
        """Files and commands of docs/planning.md."""
        text = PAGE.read_text()
        for name, body in re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, re.DOTALL):
            self.file(body, name)
        commands = [
            shlex.split(line)
            for body in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
            for line in body.splitlines()
        ]
        self.assertGreaterEqual(len(commands), 2)
        for command in commands:
            self.assertEqual(command[0], "ferry")
            done = subprocess.run(
                [os.path.abspath(FERRY), *command[1:]],
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            self.assertEqual(done.returncode, 0, f"{command}\n{done.stderr}")


if __name__ == "__main__":
    FERRY = sys.argv.pop(1)
    unittest.main()
