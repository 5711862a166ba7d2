#!/usr/bin/env bash
# All tests that need GPUs, in an order in which none takes the memory or the time of another.
#   tests/cuda/check_gpus.sh BUILD [STEP ...]
# STEP: kernels conformance engine collectives python sanitizers trials long mixed; without any: all but long, which
# takes many minutes (10,000 exchanges with poisoned memory, memory past 4 GiB, 100,000 replays), and
# mixed, for which BUILD has PTX of 8.0 beside code of its GPUs (CMAKE_CUDA_ARCHITECTURES="80-virtual;90-real"):
# one group in which every other process runs that PTX, without TMA, as on an A100.
# BUILD: a folder with the programs somewhere inside (build/cuda). python: the package, python/deep_ep and
# python/deepep are installed for PYTHON (python3). SECONDS_EACH (240): the limit of one program; LOGS (a temporary
# folder): what they said. A line for each program; exit status 1: one failed.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${1:?usage: check_gpus.sh BUILD [STEP ...]}
shift
steps=${*:-kernels conformance engine collectives python sanitizers trials}
limit=${SECONDS_EACH:-240}
logs=${LOGS:-$(mktemp -d)}
python=${PYTHON:-python3}
mkdir -p "$logs"

program() { find "$build" -type f -name "$1" -perm -u+x | head -1; }

# start NAME LIMIT COMMAND...: in the background; NAME.log, and how it ended in NAME.end. LIMIT: in
# seconds; 0: it limits its own programs.
start() {
  local name=$1 most=$2
  shift 2
  (
    begin=$SECONDS
    timeout -s INT -k 10 "$most" "$@" >"$logs/$name.log" 2>&1  # pytest then says what had failed
    echo "$? $((SECONDS - begin))" >"$logs/$name.end"
  ) &
  names+=("$name")
}

# finish: waits for what was started, and tells of each.
failed=0
names=()
finish() {
  local name status took
  wait
  for name in "${names[@]}"; do
    read -r status took <"$logs/$name.end"
    case $status in
      0) echo "ok    $name: $(tail -n 1 "$logs/$name.log") ($took s)" ;;
      77) echo "skip  $name: $(grep -m1 'NO GPU' "$logs/$name.log")" ;;
      *)
        failed=1
        echo "FAIL  $name: exit status $status ($took s); $logs/$name.log"
        tail -n 12 "$logs/$name.log" | cut -c1-160
        ;;
    esac
  done
  names=()
}

for step in $steps; do
  case $step in
    kernels)
      for test in kernel_dispatch_test kernel_combine_test kernel_expert_major_test \
        kernel_latency_test; do
        start "$test" "$limit" "$(program $test)"
      done
      finish
      start device_memory_test "$limit" "$(program device_memory_test)"
      start domain_overlap "$limit" "$(program domain_overlap)"
      ;;
    conformance)
      conformance=$(program conformance_cuda)
      for part in matrix latency domains domain_latency; do
        start "conformance_$part" "$limit" "$conformance" --parts "$part" --seconds $((limit / 2))
      done
      start conformance_rest "$limit" "$conformance" --parts interleaved,groups,graph,kill,deadline,leaks
      ;;
    engine)
      start engine 0 env LOGS="$logs/engine" SECONDS_EACH="$limit" "$here/run_engine_tests.sh" "$build"
      ;;
    collectives)
      start collectives_test "$limit" "$(program collectives_test)"
      finish
      start balancer_test "$limit" "$(program balancer_test)"
      ;;
    python)
      # As pyproject.toml has it, with any pytest.
      options=(-o minversion=0 -o addopts= --import-mode=importlib -q -p no:cacheprovider -m gpu)
      # Those that have GPU tests: others import what may not be there.
      mapfile -t tests < <(grep -lw gpu "$root"/python/tests/test_*.py)
      start python_ferry "$limit" "$python" -m pytest "${options[@]}" "${tests[@]}"
      start python_deep_ep "$limit" "$python" -m pytest "${options[@]}" "$root/python/deep_ep/tests"
      ;;
    sanitizers)
      start sanitizers 0 env LOGS="$logs/sanitizers" SECONDS_EACH="$limit" "$here/sanitize.sh" "$build"
      ;;
    trials)
      trials=$(program latency_trials)
      start trials_ll128 "$limit" "$trials" --kill 4 --stop 4
      finish
      start trials_in_words "$limit" "$trials" --kill 4 --stop 4 --tokens 8
      ;;
    mixed)
      start mixed "$limit" "$(program ferry)" run -n "${RANKS:-4}" -- \
        bash -c '((RANK % 2)) && exec "$0" 90; CUDA_FORCE_PTX_JIT=1 exec "$0" 80' "$(program engine_rank)"
      ;;
    long)
      start conformance_repeat 0 "$(program conformance_cuda)" --parts repeat,large
      finish
      start replays_ll128 0 "$(program latency_trials)" --replays 100000
      finish
      start replays_in_words 0 "$(program latency_trials)" --replays 100000 --tokens 8
      ;;
    *)
      echo "no such step: $step"
      exit 2
      ;;
  esac
  finish
done
exit $failed
