#!/usr/bin/env bash
# Prints the path of an nvcc that compiles Ferry, the last line of what it says.
#
# The first of: CUDACXX, nvcc in PATH, /usr/local/cuda; of CUDA 12.3 or newer. Where there is none,
# the pinned packages of requirements-cuda.txt from the Python index go into .venv/cuda (about 100 MB
# to fetch; needs .venv, see venv.sh).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck source=tools/setup/probe.sh
source "$here/probe.sh"

release_of() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p'; }

fit() {
  local release
  release=$(release_of "$1") && [[ -n $release ]] && at_least "$release" 12.3
}

for candidate in ${CUDACXX:+"$CUDACXX"} nvcc /usr/local/cuda/bin/nvcc; do
  if have "$candidate" && fit "$candidate"; then
    command -v "$candidate"
    exit 0
  fi
done

folder=$root/.venv/cuda
wanted=$(sha256sum <"$here/requirements-cuda.txt")
stamp=$folder/.ferry
toolkit=$folder/nvidia/cu13
if [[ ! -r $stamp || $(<"$stamp") != "$wanted" ]]; then
  echo "setup: no nvcc here; installing requirements-cuda.txt into .venv/cuda" >&2
  rm -rf "$folder"
  "$root/.venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --quiet \
    --no-deps --target "$folder" -r "$here/requirements-cuda.txt" >&2
  # As a toolkit lies: nvcc looks in lib64, CMake for the library without a number.
  ln -sfn lib "$toolkit/lib64"
  ln -sf libcudart.so.13 "$toolkit/lib/libcudart.so"
  chmod +x "$toolkit"/bin/* "$toolkit"/nvvm/bin/* 2>/dev/null || true
  echo "$wanted" >"$stamp"
fi
fit "$toolkit/bin/nvcc" || {
  echo "setup: the nvcc in .venv/cuda does not start" >&2
  exit 1
}
echo "$toolkit/bin/nvcc"
