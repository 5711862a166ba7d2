#!/usr/bin/env bash
# The tests of the CUDA engine, several at a time. Needs one GPU; two or more are better.
#   tests/cuda/run_engine_tests.sh BUILD [LANE ...]
# BUILD: a folder with engine_test somewhere inside (build/cuda). LANE: numbers from 0 of the lanes
# to be run; none: all. LANES: how many there are; 3, but 2 on one GPU, which has no room for the
# processes of more. Each has two GPUs where there are two, which it may share with its neighbours.
# Three suit: a lane then meets mostly one of the three kinds of ranks and starts few processes.
# FILTER: for --gtest_filter. SECONDS_EACH (150): the limit of a lane. LOGS (a temporary folder):
# what they said.
# Exit status 1: a test failed.
set -u
build=${1:?usage: run_engine_tests.sh BUILD [LANE ...]}
shift
program=$(find "$build" -type f -name engine_test -perm -u+x | head -1)
[ -n "$program" ] || { echo "no engine_test in $build"; exit 2; }
limit=${SECONDS_EACH:-150}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"
# By their names for CUDA, if some are left out already.
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
else
  mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)
fi
count=${#gpus[@]}
[ "$count" -gt 0 ] || { echo "NO GPU"; exit 77; }
lanes=${LANES:-$((count > 1 ? 3 : 2))}
chosen=${*:-$(seq 0 $((lanes - 1)))}
# They take all memory of their GPU, or more processes than two GPUs have room for beside the ranks
# that the lanes keep (cudaSetDevice then says cudaErrorMemoryAllocation), so they come alone.
alone='*WithoutMemory*:*EngineRegroup*'
filter=${FILTER:-*}
[[ $filter == *-* ]] && filter=$filter:$alone || filter=$filter:-$alone
failed=0

# lane NAME FIRST_GPU FILTER: in the background; NAME.log.
lane() {
  local pair=${gpus[$(($2 % count))]}
  [ "$count" -gt 1 ] && pair=$pair,${gpus[$((($2 + 1) % count))]}
  (
    start=$SECONDS
    CUDA_VISIBLE_DEVICES=$pair timeout -k 5 "$limit" "$program" --gtest_filter="$3" \
      >"$logs/$1.log" 2>&1
    echo "exit $? after $((SECONDS - start)) s on GPUs $pair" >>"$logs/$1.log"
  ) &
}

# tell NAME: what became of it.
tell() {
  local log=$logs/$1.log
  echo "$1: $(grep -c '^\[       OK' "$log") ok, $(grep -c '^\[  SKIPPED \].*(' "$log") skipped;" \
    "$(tail -1 "$log")"
  grep -q '^exit 0 ' "$log" && return
  failed=1
  grep -E '^\[  FAILED  \] .*\(|^rank [0-9]+: ' "$log" | cut -c1-300 | head -12
  grep -E '^\[ (RUN|      OK|  FAILED |  SKIPPED ) ' "$log" | tail -1  # what it was at
}

export GTEST_TOTAL_SHARDS=$lanes
for i in $chosen; do
  export GTEST_SHARD_INDEX=$i
  lane "lane$i" "$i" "$filter"
done
wait
unset GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX
for i in $chosen; do tell "lane$i"; done
if [ $# = 0 ] && [ -z "${FILTER:-}" ]; then
  lane alone 0 "$alone"
  wait
  tell alone
fi
echo "logs: $logs"
exit $failed
