#!/bin/sh
# Builds the kernel tests without the rest of the house, for sm_90, into build/cuda-kernels.
#   tests/cuda/build_kernels.sh [--all-architectures]
# --all-architectures: also checks that sm_80, sm_100 and sm_120 compile. Fails when a kernel of the
# exchange spills registers to local memory.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$root/build/cuda-kernels
nvcc=${NVCC:-nvcc}
mkdir -p "$out"
flags="-std=c++20 --fmad=false -O3 -lineinfo -cudart static -I$root/src -I$root/include
  -I$root/tests/cuda -Xcompiler=-Wall,-Wextra,-ffp-contract=off -Xptxas=-v"
kernels="plan dispatch routes barrier combine load"
tests="kernel_group dispatch_case dispatch_bench kernel_dispatch_test"

compile() {  # source, object, architecture
  if [ "$2" -nt "$1" ] && [ -z "$(find "$root/src/cuda" "$root/tests/cuda" "$root/src/core" \
      \( -name '*.hpp' -o -name '*.cuh' \) -newer "$2" | head -1)" ]; then return; fi
  # shellcheck disable=SC2086
  "$nvcc" $flags -gencode "arch=compute_$3,code=sm_$3" -c "$1" -o "$2" >"$2.log" 2>&1 || {
    cat "$2.log"; exit 1; }
  grep -E 'warning' "$2.log" || true
  if grep -E '[1-9][0-9]* bytes spill' "$2.log"; then echo "spills in $1 (sm_$3)"; exit 1; fi
}

objects=
for name in $kernels; do
  compile "$root/src/cuda/kernels/$name.cu" "$out/$name.o" 90
  case $name in load) ;; *) objects="$objects $out/$name.o" ;; esac
done
for name in $tests; do
  source=$root/tests/cuda/$name.cpp
  [ -f "$source" ] || source=$root/tests/cuda/$name.cu
  compile "$source" "$out/$name.o" 90
  objects="$objects $out/$name.o"
done
# load.cu names every file of kernels; a test that uses only some brings its own ends.
cat >"$out/absent.cpp" <<'END'
#include "cuda/kernels/load.hpp"
namespace ferry::cuda {
cudaError_t load_expert_major_kernels() { return cudaSuccess; }
}  // namespace ferry::cuda
END
# shellcheck disable=SC2086
"$nvcc" $flags -gencode arch=compute_90,code=sm_90 $objects "$out/load.o" "$out/absent.cpp" \
  "$root/src/cuda/kernels/sum_shape.cpp" \
  -o "$out/kernel_dispatch_test"
if [ "${1:-}" = --all-architectures ]; then
  for architecture in 80 100 120; do
    for name in $kernels; do
      compile "$root/src/cuda/kernels/$name.cu" "$out/$name.$architecture.o" $architecture
    done
  done
fi
echo "$out/kernel_dispatch_test"
