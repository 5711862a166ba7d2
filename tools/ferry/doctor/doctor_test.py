"""`ferry doctor` from outside: python3 doctor_test.py FERRY [unittest arguments]"""

import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

FERRY = os.environ.get("FERRY_CLI", "")
FAKE_DRIVERS = os.environ.get("FERRY_FAKE_DRIVERS", "")  # folder with libcuda.so.1 and NVML


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


def doctor(*arguments):
    return subprocess.run([FERRY, "doctor", *arguments], capture_output=True, text=True)


class Doctor(unittest.TestCase):
    def test_json(self):
        before = set(os.listdir("/dev/shm"))
        result = doctor("--json")
        found = json.loads(result.stdout)
        self.assertEqual(result.returncode, 0 if found["usable"] else 1)
        self.assertTrue(found["usable"], found["findings"])
        machine = found["machine"]
        self.assertEqual(machine["cpu"]["usable_cores"], len(os.sched_getaffinity(0)))
        self.assertEqual(machine["cpu"]["architecture"], os.uname().machine)
        self.assertEqual(machine["kernel"]["release"], os.uname().release)
        self.assertGreater(machine["memory"]["total_bytes"], 0)
        shm = os.statvfs("/dev/shm")
        self.assertEqual(machine["shared_memory"]["total_bytes"], shm.f_blocks * shm.f_frsize)
        build = found["build"]
        self.assertEqual(build["engines"][0], "host")
        self.assertEqual(build["fabrics"][:3], ["local", "shm", "sim"])
        self.assertEqual(
            "cuda" in build["engines"], any(k.startswith("sm_") for k in build["gpus"])
        )
        without = [f["what"] for f in found["findings"] if "headers of libfabric" in f["what"]]
        self.assertEqual("ofi" in build["fabrics"], not without)
        self.assertEqual(found["uses"]["backend"], "host")
        self.assertEqual(found["uses"]["processes"], "shm")
        self.assertEqual(
            [test["fabric"] for test in found["self_tests"]],
            ["shm", "shm", "local"] if found["uses"]["cuda"] else ["shm", "local"],
        )
        if machine["gpus"]["all"] and not found["uses"]["cuda"]:
            self.assertTrue(any("CUDA engine" in f["what"] for f in found["findings"]))
        self.assertTrue(all(test["passed"] for test in found["self_tests"]))
        for finding in found["findings"]:
            self.assertIn(finding["weight"], ("error", "warning", "note"))
            self.assertTrue(finding["what"] and finding["remedy"])
        self.assertEqual(left_in_shared_memory(before), set())

    def test_for_people(self):
        result = doctor()
        self.assertEqual(result.returncode, 0, result.stdout)
        for heading in ("This build", "This machine", "Ferry will use", "Self-test", "Ferry works"):
            self.assertIn(heading, result.stdout)
        self.assertEqual(result.stdout.count("passed"), 3 if "cuda (" in result.stdout else 2)

    def test_without_self_test(self):
        self.assertEqual(json.loads(doctor("--json", "--no-self-test").stdout)["self_tests"], [])

    def test_slices_of_gpus(self):
        if not FAKE_DRIVERS:
            self.skipTest("no folder of fake drivers was given")
        environment = dict(os.environ, LD_LIBRARY_PATH=FAKE_DRIVERS)
        command = [FERRY, "doctor", "--json", "--no-self-test"]
        found = json.loads(subprocess.check_output(command, env=environment))
        gpus = found["machine"]["gpus"]
        self.assertEqual([gpu["slice"] for gpu in gpus["all"]], [True, True])
        self.assertEqual([pair["p2p"] for pair in gpus["pairs"]], [False, False])
        self.assertEqual(gpus["in_mig"], 1)
        said = [f for f in found["findings"] if "MIG" in f["what"]]
        self.assertEqual(len(said), 1)
        self.assertIn("none reaches the memory of another one by pointer", said[0]["what"])
        self.assertIn("domain_size = 1", said[0]["remedy"])
        environment["FAKE_SLICES"] = "0"
        found = json.loads(subprocess.check_output(command, env=environment))
        said = [f["what"] for f in found["findings"] if "MIG" in f["what"]]
        self.assertEqual(len(said), 1)
        self.assertIn("MIG is on for 1 GPU, and this process is given no slice", said[0])

    def test_waits(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "waits.txt")
            with open(path, "w", encoding="utf-8") as file:
                file.write("0 9 900000\n8 0 900000\n7 6 0\n")
            result = doctor("--waits", path)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("Rank 2 is a slow sender", result.stdout)
            result = doctor("--waits", path, path)
            self.assertEqual(result.returncode, 2)
            self.assertIn("waits.txt", result.stderr)
            self.assertEqual(doctor("--waits", path, "--json").returncode, 2)

    def test_plot(self):
        """What is given to python3, which stands for the one with matplotlib."""
        with tempfile.TemporaryDirectory() as folder:
            python = Path(folder) / "python3"
            python.write_text(
                "#!/bin/sh\n[ $# -gt 2 ] || exit 0\n"
                f'printf %s "$2" > {folder}/program.py\ncp "$3" "$5"\n'
            )
            python.chmod(0o755)
            environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
            waits, image = Path(folder) / "waits.txt", Path(folder) / "a.svg"
            waits.write_text("5 9 900000\n8 0 900000\n7 6 0\n")
            ferry = os.path.abspath(FERRY)
            jobs = (
                [ferry, "doctor", "--waits", str(waits)],
                [ferry, "run", "-n", "2", "--", ferry, "doctor", "--net"],
            )
            for command in jobs:
                done = subprocess.run(
                    [*command, "--plot", image], env=environment, capture_output=True, text=True
                )
                self.assertEqual(done.returncode, 0, done.stderr)
                drawn = json.loads(image.read_text())
                if "--waits" in command:
                    self.assertEqual(drawn["waits_ns"], [[5, 9, 9e5], [8, 0, 9e5], [7, 6, 0]])
                    self.assertIn("Rank 2 is a slow sender", drawn["odd"][0])
                else:
                    self.assertEqual([len(row) for row in drawn["bytes_per_s"]], [2, 2])
            own = Path(__file__).resolve().parents[3] / "bench" / "plot_matrix.py"
            self.assertEqual((Path(folder) / "program.py").read_text(), own.read_text())
            # What cannot be drawn is refused before anything is measured.
            for bad, why in ((Path(folder) / "none" / "a.svg", "No such file"), ("a.txt", ".png")):
                for command in jobs:
                    done = subprocess.run(
                        [*command, "--plot", bad], env=environment, capture_output=True, text=True
                    )
                    self.assertEqual(done.returncode, 1, done.stderr)
                    self.assertEqual(done.stdout, "")
                    self.assertIn(why, done.stderr)
            self.assertFalse(Path("a.txt").exists())
        refused = doctor("--plot", "a.svg")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("--net or --waits", refused.stderr)

    def test_net(self):
        command = [FERRY, "run", "-n", "3", "--", FERRY, "doctor", "--net"]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        # The prefix of rank 0, and nothing from the others.
        lines = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
        found = json.loads("\n".join(lines))
        self.assertEqual(found["domains"], [0, 0, 0])
        self.assertEqual(found["fabric"], "shm")
        self.assertEqual(found["nics"], [[], [], []])
        for name in ("latency_ns", "bytes_per_s"):
            for a, row in enumerate(found[name]):
                self.assertEqual([value > 0 for value in row], [a != b for b in range(3)])
        self.assertEqual(found["together_bytes_per_s"], [0, 0, 0])  # to other hosts: none
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertIn("Inside a host usually", done.stdout)

    def test_net_tells_nics(self):
        command = [FERRY, "run", "-n", "2", "--", FERRY, "doctor", "--net", "--fabric", "ofi"]
        environment = dict(os.environ, FERRY_OFI_NICS="127.0.0.1,127.0.0.2")
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if "libfabric" in done.stderr and done.returncode != 0:
            self.skipTest(done.stderr.splitlines()[0])
        self.assertEqual(done.returncode, 0, done.stderr)
        # As near to both, so they share them out.
        for rank in range(2):
            self.assertRegex(done.stdout, rf"  rank {rank}: \w+ \(127.0.0.{rank + 1}\), of unknown")
        self.assertIn("one of 2 as near; shared by 2 ranks", done.stdout)

    def test_net_wants_a_job(self):
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            [FERRY, "doctor", "--net"], capture_output=True, text=True, env=environment
        )
        self.assertEqual(done.returncode, 1)
        self.assertIn("ferry run -n 4", done.stderr)
        self.assertEqual(doctor("--fabric", "ofi").returncode, 2)

    def test_wrong_command_line(self):
        self.assertEqual(doctor("--bogus").returncode, 2)


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        FERRY = os.path.abspath(sys.argv.pop(1))
    unittest.main()
