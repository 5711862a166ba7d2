"""`ferry bench` from outside: python3 bench_test.py FERRY [unittest arguments]"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

FERRY = os.environ.get("FERRY_CLI", "")
TINY = "--tokens 12 --latency-tokens 5 --hidden 256 --experts 6 --topk 3 --iterations 3 --warmup 1"
THROUGHPUT = [
    "plan",
    "dispatch, full",
    "dispatch, cached",
    "combine, registered",
    "combine, ordinary",
]
LATENCY = [
    "latency dispatch",
    "latency combine, per slot",
    "latency combine, per rank",
    "latency pair, per slot",
    "latency pair, per rank",
    "latency dispatch, send",
    "latency dispatch, receive",
    "latency combine, send",
    "latency combine, receive",
]


def setUpModule():
    if not FERRY:
        raise unittest.SkipTest("give the path of the ferry command (ctest -L cli does)")


def left_in_shared_memory(before):
    """Names that were not there before and stay: those of other jobs go as soon as they meet.
    Python's multiprocessing makes semaphores, Ferry none."""
    now = set(os.listdir("/dev/shm"))
    left = {name for name in now - before if not name.startswith("sem.mp-")}
    end = time.monotonic() + 5
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left &= set(os.listdir("/dev/shm"))
    return left


def bench(arguments):
    return subprocess.run(
        [FERRY, "bench", *TINY.split(), *arguments.split()],
        capture_output=True,
        text=True,
    )


class Bench(unittest.TestCase):
    def measured(self, arguments):
        result = bench(arguments + " --json")
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_json(self):
        found = self.measured("-n 2 --seed 5")
        self.assertEqual([line["name"] for line in found["results"]], THROUGHPUT + LATENCY)
        self.assertTrue(found["data_checked"])
        self.assertEqual(found["command"][:2], ["ferry", "bench"])
        self.assertIn("--seed", found["command"])
        self.assertEqual(found["settings"]["fabric"], "shm")
        self.assertGreater(found["machine"]["cpu"]["cores"], 0)
        for line in found["results"]:
            self.assertGreater(line["p50_us"], 0)
            self.assertLessEqual(line["min_us"], line["p50_us"])
            self.assertLessEqual(line["p50_us"], line["p95_us"])
            self.assertEqual(line["logical_bytes"], line["rows"] * line["row_bytes"])
            self.assertLessEqual(line["wire_bytes"], line["logical_bytes"])
        by_name = {line["name"]: line for line in found["results"]}
        self.assertEqual(by_name["latency combine, per slot"]["rows"], 2 * 5 * 3)
        by_rank = by_name["latency combine, per rank"]["rows"]
        self.assertEqual(by_rank, by_name["latency dispatch"]["rows"])
        self.assertLess(by_rank, 2 * 5 * 3)

    def test_every_dtype(self):
        for dtype, row in (("f32", 1024), ("bf16", 512), ("f16", 512), ("e4m3", 256 + 2 * 4)):
            with self.subTest(dtype=dtype):
                found = self.measured(f"-n 3 --threads --dtype {dtype} --routes zipf")
                self.assertEqual(found["settings"]["fabric"], "local")
                self.assertEqual(found["results"][1]["row_bytes"], row)

    def test_modes_and_ranks(self):
        found = self.measured("-n 1 --mode throughput")
        self.assertEqual([line["name"] for line in found["results"]], THROUGHPUT)
        self.assertTrue(all(line["wire_bytes"] == 0 for line in found["results"]))
        found = self.measured("-n 5 --threads --mode latency")
        self.assertEqual([line["name"] for line in found["results"]], LATENCY)

    def test_domains(self):
        for network, name in (("automatic", "local+copies"), ("sim", "local+sim")):
            with self.subTest(network=network):
                found = self.measured(
                    f"-n 4 --threads --domain-size 2 --network {network} --crossing hierarchical"
                )
                self.assertEqual(found["settings"]["fabric"], name)
                self.assertEqual(found["settings"]["domain_size"], 2)
                self.assertEqual(found["settings"]["crossing"], "hierarchical")
        table = bench("-n 3 --threads --mode throughput --domain-size 2 --crossing direct")
        self.assertIn("local+copies in domains of 2, crossing direct", table.stdout)

    def test_tune(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tuning.json"
            arguments = f"-n 4 --domain-size 2 --mode throughput --tune {file}"
            result = bench(arguments)
            self.assertEqual(result.returncode, 0, result.stderr)
            entries = json.loads(file.read_text())["entries"]
            calls = [(one["call"], one["first"]) for one in entries]
            self.assertEqual(calls.count(("combine", False)), 1)
            self.assertEqual(calls.count(("dispatch", True)), 1)
            self.assertGreaterEqual(calls.count(("dispatch", False)), 1)
            for one in entries:
                self.assertIn(f"{one['chunk_bytes'] // 1024} KiB  {one['why']}", result.stdout)
                self.assertEqual(one["ranks"], 4)
                self.assertLessEqual(one["probes"], 30)
            os.environ["FERRY_TUNING"] = str(file)  # it can be read again
            try:
                self.assertEqual(bench("-n 4 --domain-size 2 --mode throughput").returncode, 0)
                file.write_text("{}")
                refused = bench("-n 4 --domain-size 2 --mode throughput")
            finally:
                del os.environ["FERRY_TUNING"]
            self.assertEqual(refused.returncode, 1)
            self.assertIn('"format": 1', refused.stderr)
        self.assertIn("--domain-size", bench("-n 4 --tune x").stderr)
        self.assertIn("--tune", bench("-n 4 --domain-size 2 --oracle 1").stderr)
        one = bench("-n 2 --domain-size 2 --mode throughput --tune tuning.json")
        self.assertEqual(one.returncode, 2)
        self.assertIn("one domain of 2 ranks, where nothing is chosen", one.stderr)
        nowhere = bench("-n 2 --domain-size 1 --mode throughput --tune /no/such/folder/t.json")
        self.assertEqual(nowhere.returncode, 1)
        self.assertNotIn("throughput mode", nowhere.stderr)  # nothing was measured for it

    def test_oracle(self):
        """All settings are measured, and what the tuned ones lose is said."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tuning.json"
            small = "--hidden 64 --tokens 16 --iterations 1 --warmup 0"
            arguments = f"-n 4 --domain-size 2 --mode throughput {small} --tune {file} --oracle 3"
            done = bench(arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(len(re.findall(r", regret \d+\.\d %", done.stdout)), 2)
            judged = [e for e in json.loads(file.read_text())["entries"] if "oracle" in e]
            found = {e["call"]: e["oracle"] for e in judged}
            self.assertEqual(
                {call: one["settings"] for call, one in found.items()},
                {"dispatch": 10, "combine": 5},
            )
            self.assertIn("% against what other rounds call the fastest", done.stdout)
            for call, one in found.items():
                self.assertGreater(one["regret_apart"], -1)
                calls = {"dispatch": 3 * 10, "combine": 2 * 3 * 10}[call]  # of both crossings
                self.assertEqual(
                    [len(each["us"]) for each in one["calls_us"]], [calls] * one["settings"]
                )
                self.assertLessEqual(one["fastest_us"], one["us"])
                self.assertLessEqual(one["us"], one["slowest_us"])
                self.assertAlmostEqual(one["regret"], one["us"] / one["fastest_us"] - 1)

    def test_latency_mode_takes_several_numbers_of_tokens(self):
        found = self.measured("-n 2 --threads --mode latency --token-sweep 1,4 --chain 2")
        self.assertEqual([line["name"] for line in found["results"]], 2 * LATENCY)
        self.assertEqual(
            [line["tokens"] for line in found["results"]], len(LATENCY) * [1] + len(LATENCY) * [4]
        )
        self.assertEqual(found["settings"]["chain"], 2)

    def test_table(self):
        before = set(os.listdir("/dev/shm"))
        result = bench("-n 2")
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in (*THROUGHPUT, *LATENCY, "p50", "p95", "logical GB/s", "wire GB/s"):
            self.assertIn(word, result.stdout)
        self.assertNotIn("alone us", result.stdout)  # of GPUs
        self.assertIn("bench: throughput mode", result.stderr)
        self.assertEqual(left_in_shared_memory(before), set())

    def test_a_rank_that_is_killed_is_named(self):
        before = set(os.listdir("/dev/shm"))
        bench = subprocess.Popen(
            [FERRY, "bench", *TINY.split(), "-n", "3", "--iterations", "1000000"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        ranks = []
        end = time.monotonic() + 20
        while len(ranks) < 3 and time.monotonic() < end:
            time.sleep(0.1)
            ranks = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
        time.sleep(0.5)
        os.kill(int(ranks[1]), signal.SIGKILL)
        _, errors = bench.communicate(timeout=30)
        self.assertEqual(bench.returncode, 1)
        self.assertIn("ferry bench: rank 1: its process was killed by signal 9 (SIGKILL)", errors)
        self.assertIn("(2 more ranks failed)", errors)
        self.assertFalse(any(Path(f"/proc/{pid}").exists() for pid in ranks))
        self.assertEqual(left_in_shared_memory(before), set())

    def test_plot(self):
        """What is given to python3, which stands for the one with matplotlib."""
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder) / "python3"
            python.write_text(
                "#!/bin/sh\n[ $# -gt 2 ] || exit 0\n"
                f'printf %s "$2" > {folder}/program.py\ncp "$3" "$5"\n'
            )
            python.chmod(0o755)
            paths = f"{folder}:{os.environ['PATH']}"
            arguments = f"-n 2 --mode throughput --json {folder}/found.json --plot {folder}/a.png"
            command = [os.path.abspath(FERRY), "bench", *TINY.split(), *arguments.split()]
            done = subprocess.run(
                command, env=os.environ | {"PATH": paths}, capture_output=True, text=True
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            drawn = json.loads((Path(folder) / "a.png").read_text())
            self.assertEqual([line["name"] for line in drawn["results"]], THROUGHPUT)
            own = Path(__file__).resolve().parents[3] / "bench" / "plot_exchange.py"
            self.assertEqual((Path(folder) / "program.py").read_text(), own.read_text())

    def test_json_into_a_file_leaves_the_table(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            result = bench(f"-n 2 --mode throughput --json {path}")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("logical GB/s", result.stdout)
            self.assertEqual(
                [line["name"] for line in json.loads(path.read_text())["results"]], THROUGHPUT
            )
            result = bench(f"-n 2 --mode throughput --json {folder}/none/found.json")
            self.assertEqual(result.returncode, 1)
            self.assertIn("cannot write", result.stderr)
            self.assertEqual(result.stdout, "")  # nothing was measured for it

    def test_without_a_gpu_it_says_so(self):
        result = bench("--backend cuda -n 2 --sms 1,3,7 --token-sweep 1,20 --nccl off")
        if result.returncode == 0:  # there is one
            self.assertIn("dispatch, expert-major", result.stdout)
            self.assertIn("NCCL is not in the table: --nccl off", result.stdout)
            return
        self.assertEqual(result.returncode, 1)
        self.assertIn("there is no GPU, or this build has no CUDA engine", result.stderr)

    def test_latency_mode_without_a_gpu_says_so(self):
        result = bench("--backend cuda -n 2 --mode latency --token-sweep 1,5")
        if result.returncode == 0:
            self.assertIn("latency pair, per rank", result.stdout)
            self.assertIn("latency events alone", result.stdout)
            return
        self.assertEqual(result.returncode, 1)
        self.assertIn("there is no GPU, or this build has no CUDA engine", result.stderr)

    def test_what_no_machine_has_room_for_is_refused_before(self):
        large = "-n 512 --tokens 1048576 --latency-tokens 4096 --hidden 16384"
        for mode in ("throughput", "latency"):
            for ranks in ("--threads", "--processes"):
                with self.subTest(mode=mode, ranks=ranks):
                    result = bench(f"{large} --mode {mode} {ranks}")
                    self.assertEqual(result.returncode, 1)
                    self.assertRegex(
                        result.stderr,
                        rf"ferry bench: {mode} mode on 512 ranks takes about [0-9.]+ .iB of "
                        r"memory; here are .*Less: ",
                    )

    def test_wrong_command_lines_are_refused_with_a_reason(self):
        for arguments, reason in (
            ("--topk 9", "there are only 6 experts"),
            ("--hidden 3", "multiple of 16"),
            ("--dtype i8", "--dtype: 'i8': must be one of bf16|e4m3|f16|f32\n"),
            ("--tokens 0", "--tokens: 0: must be at least 1\n"),
            ("--tokens 99999999999999999999", "must be at most 1048576\n"),
            ("--tokens ten", "--tokens: 'ten': must be a whole number\n"),
            ("--ranks 513", "--ranks: 513: must be at most 512\n"),
            ("--seed -1", "--seed: -1: must be at least 0\n"),
            ("--threads --processes", "--processes"),
            ("--fabric local", "add --threads"),
            ("--tokens -1", "--tokens"),
            ("--network sim", "--network requires --domain-size"),
            ("--domain-size 2 --network sim", "--network sim joins threads: add --threads\n"),
            ("--domain-size 2 --fabric ofi", "ranks share no memory over --fabric sim and ofi"),
            ("--domain-size 0", "--domain-size: 0: must be at least 1\n"),
            ("--backend cuda --domain-size 2", "--domain-size: only with --backend host"),
            ("--sms 4", "--sms: only with --backend cuda"),
            ("--nccl off", "--nccl: only with --backend cuda"),
            ("--backend cuda --sms 4,x", "--sms: 'x': must be a whole number\n"),
            ("--backend cuda --sms 0", "--sms: 0: must be at least 1\n"),
            ("--token-sweep 4", "--token-sweep: only with --backend cuda"),
            ("--backend cuda --mode all", "measures --mode throughput or --mode latency"),
            ("--backend cuda --mode latency --sms 4", "--sms: only with --mode throughput"),
            ("--json --plot a.png", "needs --json FILE"),
            ("--backend cuda --topk 9", "there are only 6 experts"),
        ):
            with self.subTest(arguments=arguments):
                result = bench(arguments)
                self.assertEqual(result.returncode, 2)
                self.assertIn(reason, result.stdout + result.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        FERRY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
