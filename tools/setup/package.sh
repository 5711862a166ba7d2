#!/usr/bin/env bash
# Builds the Python package with the command line and installs it into .venv, with a count of the
# steps, and python/deep_ep beside it. build/python keeps the objects; everything that was said is in
# build/logs/package-build.log.
#
# FERRY_CUDA=1 builds the CUDA engine, FERRY_CUDA=0 does not; unset: where there is a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
log=build/logs/package-build.log
mkdir -p build/logs

# [12/100] lines of the build: one line that counts up on a terminal, else each time 10 % are done.
show_steps() {
  local line tenth=0 ended=
  while IFS= read -r line; do
    if [[ $line =~ \[([0-9]+)/([0-9]+)\] ]]; then
      if [[ -t 1 ]]; then
        printf '\r  %s of %s steps' "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
        ended='\n'
      elif ((BASH_REMATCH[1] * 10 / BASH_REMATCH[2] > tenth)); then
        tenth=$((BASH_REMATCH[1] * 10 / BASH_REMATCH[2]))
        echo "  ${BASH_REMATCH[1]} of ${BASH_REMATCH[2]} steps"
      fi
    fi
  done
  printf '%b' "$ended"
}

options=()
has_gpu=$(compgen -G '/dev/nvidia[0-9]*' || true)
choice=${FERRY_CUDA:-$([[ -n $has_gpu ]] && echo 1 || echo 0)}
if [[ $choice == 1 || $choice == ON ]]; then
  if nvcc=$(tools/setup/cuda.sh | tail -n 1) && [[ -n $nvcc ]]; then
    options=(--config-settings=cmake.define.FERRY_CUDA=ON
      --config-settings=cmake.define.CMAKE_CUDA_COMPILER="$nvcc")
    if [[ -n $has_gpu ]]; then  # only for the GPUs of this machine
      options+=(--config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=native)
    fi
    echo "with the CUDA engine: $nvcc"
  elif [[ -n ${FERRY_CUDA:-} ]]; then
    echo "FERRY_CUDA=$FERRY_CUDA, but there is no nvcc of CUDA 12.4 or newer" >&2
    exit 1
  fi
fi
if ((${#options[@]} == 0)); then
  options=(--config-settings=cmake.define.FERRY_CUDA=OFF)
  echo 'without the CUDA engine (FERRY_CUDA=1 builds it)'
fi
rm -f build/python/.installed*

echo 'building the Python package and the command line into .venv'
if ! .venv/bin/python -m pip install --verbose --disable-pip-version-check --no-build-isolation \
  --no-deps --force-reinstall --config-settings=build-dir=build/python \
  --config-settings=cmake.define.FERRY_TOOLS=ON "${options[@]}" . 2>&1 | tee "$log" | show_steps; then
  tail -n 60 "$log" >&2
  echo "the build failed; all of its output: $log" >&2
  exit 1
fi

# The drop-in: a distribution of its own, pure Python.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
  --force-reinstall ./python/deep_ep
