#!/usr/bin/env bash
# compute-sanitizer over the kernels and over the engine, with small shapes. Needs a GPU.
#   tests/cuda/sanitize.sh BUILD [TOOL ...]      TOOL: memcheck racecheck synccheck initcheck
# BUILD: a folder with the programs somewhere inside (build/cuda). SECONDS_EACH (120): the limit of
# one program; LOGS (a temporary folder): where what they said goes. Exit status 1: one found fault.
#
# Tools may run one kernel after another, and kernels of ranks that wait for each other would then
# stand still. So the kernels' tests run as one rank, which waits for itself alone; the engine runs
# as two ranks, each a process with a sanitizer of its own. memcheck lets kernels run side by side:
# there the kernels' tests have two ranks in a process, too.
#
# Nothing is filtered out but by choice of the program: initcheck runs on one rank of the engine
# only. What a peer writes into this rank's memory no sanitizer of this process sees, so with two
# ranks it would call all received rows uninitialised; and the kernels' tests poison their memory,
# so there it could find nothing.
set -u
build=${1:?usage: sanitize.sh BUILD [TOOL ...]}
shift
tools=${*:-memcheck racecheck synccheck initcheck}
limit=${SECONDS_EACH:-120}
logs=${LOGS:-$(mktemp -d)}
sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
export FERRY_TEST_PATIENCE=${FERRY_TEST_PATIENCE:-30}
mkdir -p "$logs"
failed=0

program() { find "$build" -type f -name "$1" -perm -u+x | head -1; }

# check NAME TOOL COMMAND...: runs it; NAME.TOOL.log. TOOL is only for the words.
check() {
  local name=$1 tool=$2 start=$SECONDS log status words
  log=$logs/${name//[, ]/_}.$tool.log
  shift 2
  timeout -k 5 "$limit" "$@" >"$log" 2>&1
  status=$?
  words=$(grep -hE 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | sed 's/.*========= //' | sort | uniq -c |
    sed 's/^ *//' | paste -sd';' -)
  if [ $status = 77 ]; then
    echo "skip  $tool, $name: $(grep -m1 SKIPPED "$log")"
    return
  fi
  if [ $status = 0 ] && grep -qE 'PASSED$|^OK$' "$log"; then
    echo "ok    $tool, $name: $words ($((SECONDS - start)) s)"
    return
  fi
  failed=1
  [ $status = 124 ] && words="no end within $limit s; $words"
  echo "FAIL  $tool, $name: exit status $status; $words ($((SECONDS - start)) s); $log"
  grep -vE '^=+ +(COMPUTE-SANITIZER|Host Frame|$)' "$log" | head -"${LINES_SHOWN:-12}" | cut -c1-160
}

for tool in $tools; do
  watch=("$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 20)
  if [ "$tool" != initcheck ]; then
    for test in kernel_dispatch_test kernel_combine_test kernel_expert_major_test \
      kernel_latency_test; do
      check "$test" "$tool" "${watch[@]}" "$(program $test)" --small
      [ "$tool" = memcheck ] &&
        check "$test, two ranks" "$tool" "${watch[@]}" "$(program $test)" --small --ranks 2
    done
    check "engine_rank, two ranks" "$tool" \
      "$(program ferry)" run -n 2 -- "${watch[@]}" "$(program engine_rank)"
  else
    check engine_rank "$tool" "${watch[@]}" "$(program engine_rank)"
  fi
done
exit $failed
