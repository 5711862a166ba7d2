"""ferry plan: the table, files in place of presets, and what is refused. First argument: ferry."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path


def plan(*options):
    return subprocess.run(
        [FERRY, "plan", *options], capture_output=True, text=True, timeout=60, check=False
    )


def rows(*options):
    done = plan("--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Plan(unittest.TestCase):
    def test_names_the_bottleneck(self):
        done = plan("--ranks", "8,64")
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), 5)
        self.assertIn("NVLink", lines[1])
        self.assertIn("NIC", lines[3])
        self.assertIn("hierarchical", lines[3])

    def test_every_model(self):
        for model in ("deepseek-v3", "qwen3-235b", "kimi-k2", "gpt-oss-120b"):
            self.assertEqual(len(rows("--model", model, "--ranks", "64")), 2)

    def test_a_file_of_a_cluster(self):
        with tempfile.TemporaryDirectory() as folder:
            cluster = Path(folder) / "cluster.json"
            cluster.write_text('{"host_ranks": 4, "nic": 40, "message_us": 1000}')
            made = rows("--cluster", str(cluster), "--ranks", "8")
            self.assertEqual(made[0]["bottleneck"], "messages")
            # One message to the other host; direct: one to each of its 4 ranks.
            self.assertGreater(made[0]["direct_us"], made[0]["hierarchical_us"] + 2000)
            cluster.write_text('{"nics": 40}')
            done = plan("--cluster", str(cluster))
            self.assertEqual(done.returncode, 1)
            self.assertIn("unknown key nics", done.stderr)
            cluster.write_text('{"nic": -1}')
            self.assertIn("not below 0", plan("--cluster", str(cluster)).stderr)

    def test_refuses(self):
        self.assertIn("256 experts", plan("--ranks", "512").stderr)
        done = plan("--model", "no-such")
        self.assertEqual(done.returncode, 1)
        self.assertIn("gpt-oss-120b", done.stderr)
        self.assertEqual(plan("--ranks", "0").returncode, 2)


if __name__ == "__main__":
    FERRY = sys.argv.pop(1)
    unittest.main()
