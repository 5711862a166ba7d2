"""What the tests of ferry plan and calibrate share. `run_tests` takes ferry from the arguments."""

import json
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "planning.md"
RESULTS = ROOT / "bench" / "results"


def ferry(*options, **more):
    return subprocess.run(
        [FERRY, *map(str, options)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **more,
    )


def plan(*options):
    return ferry("plan", *options)


def calibrate(*options):
    return ferry("calibrate", *options)


def rows(*options):
    done = plan("--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Case(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = Path(made.name)

    def file(self, text, name="file.yaml"):
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def record(self, name, rank, ranks, experts, calls, topk=2):
        """As Group.record_routes writes it; calls: lists of experts, topk of each token."""
        data = struct.pack("<8sIIQ", b"FERRYRT1", rank, ranks, experts)
        for ids in calls:
            data += struct.pack(f"<II{len(ids)}i", len(ids) // topk, topk, *ids)
        (self.folder / f"{name}.{rank}").write_bytes(data)


FERRY = ""


def run_tests():
    global FERRY
    FERRY = str(Path(sys.argv.pop(1)).resolve())
    unittest.main()
