"""Command line of the fuzzer; see `fuzz.py`. Run as `python tests/sequences`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sequences.fuzz import main

if __name__ == "__main__":
    sys.exit(main())
