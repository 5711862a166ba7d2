"""Over a real communicator of mpi4py, not only over what looks like one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = shutil.which("mpirun")
MISSING = [
    what
    for what, there in (("mpirun", LAUNCHER), ("mpi4py", importlib.util.find_spec("mpi4py")))
    if not there
]


@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")
def test_a_communicator_of_mpi4py() -> None:
    """4 ranks, and twice 2 of them."""
    # Open MPI: more ranks than cores, and as root in containers. Others take no such variables.
    more = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    more |= {"OMP_NUM_THREADS": "1"}
    more |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    program = Path(__file__).with_name("mpi_program.py")
    done = subprocess.run(
        [str(LAUNCHER), "-n", "4", sys.executable, str(program)],
        env=os.environ | more,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["served", "0", "1", "2", "3"]
