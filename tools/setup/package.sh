#!/usr/bin/env bash
# Builds the Python package with the command line and installs it into .venv, with a count of the
# steps, and python/deep_ep and python/deepep beside it. build/python keeps the objects; everything
# that was said is in build/logs/package-build.log.
#
#   tools/setup/package.sh           builds and installs
#   tools/setup/package.sh --found   prints what a build depends on besides the sources: when it
#                                    differs, `make package` builds anew
#
# cmake/FerryCudaChoice.cmake has the rule by which the CUDA engine is built. Where there is a GPU
# but no nvcc, or FERRY_CUDA=1 asks for one, an nvcc is fetched first (tools/setup/cuda.sh). Kernels
# are compiled for the GPUs of this machine; without one for one kind, which is enough to load.
# CUDAARCHS and CUDAFLAGS, variables that CMake reads, say otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tools/setup/probe.sh
source tools/setup/probe.sh
log=build/logs/package-build.log

has_gpu=$(compgen -G '/dev/nvidia[0-9]*' || true)
case ${FERRY_CUDA:-unset} in
  unset) wants_nvcc=$has_gpu ;;
  0 | OFF | off | NO | no | FALSE | false) wants_nvcc= ;;
  *) wants_nvcc=1 ;;
esac
if [[ -n $wants_nvcc ]]; then
  if nvcc=$(tools/setup/cuda.sh | tail -n 1) && [[ -n $nvcc ]]; then
    export CUDACXX=$nvcc
  elif [[ -n ${FERRY_CUDA:-} ]]; then
    echo "FERRY_CUDA=$FERRY_CUDA, but there is no nvcc of CUDA 12.3 or newer" >&2
    exit 1
  fi
fi
architectures=${CUDAARCHS:-$([[ -n $has_gpu ]] && echo native || echo 90-real)}
engine=$(cmake -P cmake/FerryCudaChoice.cmake)
engine=${engine#*Ferry: }

if [[ ${1:-} == --found ]]; then
  "$(cxx)" --version | head -n 1
  .venv/bin/python -c 'import sys; print(sys.version)'
  echo "headers of libfabric: $(have_header rdma/fabric.h && echo yes || echo no)"
  echo "$engine, for $architectures ${CUDAFLAGS:-}"
  exit 0
fi
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

# What an earlier configuration found or was told does not hold any more; objects stay.
rm -f .venv/.ferry-package build/python/CMakeCache.txt
echo "$engine (FERRY_CUDA=0 or 1 decides)"
# The distribution once had the name `ferry`: pip would mix the files of the two.
.venv/bin/python -m pip uninstall --quiet --yes ferry 2>/dev/null || true
echo 'building the Python package and the command line into .venv'
if ! .venv/bin/python -m pip install --verbose --disable-pip-version-check --no-build-isolation \
  --no-deps --force-reinstall --config-settings=build-dir=build/python \
  --config-settings=cmake.define.FERRY_PCH=ON \
  --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=$architectures . 2>&1 |
  tee "$log" | show_steps; then
  tail -n 60 "$log" >&2
  echo "the build failed; all of its output: $log" >&2
  exit 1
fi

# The drop-in and the three calls: distributions of their own, pure Python.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
  --force-reinstall ./python/deep_ep ./python/deepep
