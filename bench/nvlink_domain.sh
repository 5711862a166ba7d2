#!/usr/bin/env bash
# The main figures of docs/benchmarks.md of one NVLink domain, in one go: first whether all is bit-exact
# with so many ranks, then throughput over SMs and tokens and decode, beside NCCL's in the same run.
#   bench/nvlink_domain.sh BUILD FOLDER [RANKS]
# BUILD: a folder with ferry and conformance_cuda somewhere inside (build/cuda). FOLDER: where JSON and
# plots go, RANKSxGPUS_*; what programs say goes to RANKSxGPUS_*.log. RANKS: 1, 2, 3, 4 or 8, as the matrix
# has them; by default as many as there are GPUs. FERRY_NCCL: libnccl.so.2, where the loader does not find
# it. By default with the shapes of the documents, some ten minutes; less of it by SECONDS_EACH (120: of
# the matrix), TOKENS ("4096 8192"), SMS (8,16,24,32,64), SMALL (1,16,128,512,2048: tokens, 24 SMs), DECODE
# (1,16,64,128,256,512) and MORE (options for every bench). LIMIT (600): seconds of a step.
# Exit status 1: something was wrong, or did not end in time; 2: no such number of ranks.
set -u
build=${1:?usage: nvlink_domain.sh BUILD FOLDER [RANKS]}
folder=${2:?usage: nvlink_domain.sh BUILD FOLDER [RANKS]}
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
else
  mapfile -t visible < <(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null)
fi
gpus=${#visible[@]}
ranks=${3:-$gpus}
[ "$gpus" -gt 0 ] || { echo "NO GPU"; exit 77; }
case $ranks in
  1 | 2 | 3 | 4 | 8) ;;
  *) echo "ranks: got $ranks, expected 1, 2, 3, 4 or 8"; exit 2 ;;
esac
seconds=${SECONDS_EACH:-120}
limit=${LIMIT:-600}
sms=${SMS:-8,16,24,32,64}
read -ra more <<<"${MORE:-}"
failed=0
mkdir -p "$folder"

program() { find "$build" -type f -name "$1" -perm -u+x | head -1; }
ferry=$(program ferry)
conformance=$(program conformance_cuda)

# step NAME COMMAND...: shows what it prints, and says how it ended.
step() {
  local name=$1 start=$SECONDS log=$folder/${ranks}x${gpus}_$1.log
  shift
  echo "== $name: $*"
  timeout -k 5 "$limit" "$@" 2>"$log.progress" | tee "$log"
  local status=${PIPESTATUS[0]}
  cat "$log.progress" >>"$log"
  rm "$log.progress"
  [ "$status" = 0 ] || { failed=1; echo "FAILED: exit status $status; $log"; tail -n 3 "$log"; }
  echo "== $name: $((SECONDS - start)) s"
}

# bench NAME OPTION...: a table, NAME.json, and a plot where there is matplotlib.
bench() {
  local json=$folder/${ranks}x${gpus}_$1.json name=$1
  shift
  local plot=()
  python3 -c 'import matplotlib' 2>/dev/null && plot=(--plot "${json%.json}.png")
  step "$name" "$ferry" bench --backend cuda --ranks "$ranks" --json "$json" "${plot[@]}" "${more[@]}" "$@"
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
step conformance_matrix "$conformance" --ranks "$ranks" --parts matrix --cases full --seconds "$seconds"
step conformance_rest "$conformance" --ranks "$ranks" --parts latency,graph,interleaved
for tokens in ${TOKENS:-4096 8192}; do
  bench "exchange_$tokens" --mode throughput --tokens "$tokens" --sms "$sms"
done
bench tokens --mode throughput --sms 24 --token-sweep "${SMALL:-1,16,128,512,2048}"
bench latency --mode latency --token-sweep "${DECODE:-1,16,64,128,256,512}"
exit $failed
