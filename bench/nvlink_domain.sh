#!/usr/bin/env bash
# What docs/benchmarks.md says of one NVLink domain, in one go: first whether all is bit-exact with so
# many ranks, then the figures, beside NCCL's in the same run.
#   bench/nvlink_domain.sh BUILD FOLDER [RANKS]
# BUILD: a folder with ferry and conformance_cuda somewhere inside (build/cuda). FOLDER: where JSON and
# plots go, RANKSxGPUS_*. RANKS: as many as there are GPUs. FERRY_NCCL: libnccl.so.2, where the loader
# does not find it. By default with the shapes of the documents, some ten minutes; less of it by
# SECONDS_EACH (120: of each part of the conformance), TOKENS ("4096 8192"), SMS (8,16,24,32,64),
# DECODE (1,16,64,128,256,512) and MORE (options for every bench).
# Exit status 1: something was wrong, or did not end.
set -u
build=${1:?usage: nvlink_domain.sh BUILD FOLDER [RANKS]}
folder=${2:?usage: nvlink_domain.sh BUILD FOLDER [RANKS]}
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l)
ranks=${3:-$gpus}
[ "$gpus" -gt 0 ] || { echo "NO GPU"; exit 77; }
seconds=${SECONDS_EACH:-120}
sms=${SMS:-8,16,24,32,64}
read -ra more <<<"${MORE:-}"
failed=0
mkdir -p "$folder"

program() { find "$build" -type f -name "$1" -perm -u+x | head -1; }
ferry=$(program ferry)
conformance=$(program conformance_cuda)

# step NAME COMMAND...: says what it printed, and how it ended.
step() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name: $*"
  "$@" 2>"$folder/${ranks}x${gpus}_$name.log" || { failed=1; echo "FAILED, $folder/${ranks}x${gpus}_$name.log"; }
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
for part in matrix latency; do
  step "conformance_$part" "$conformance" --ranks "$ranks" --parts "$part" --cases full --seconds "$seconds"
done
step conformance_graph "$conformance" --ranks "$ranks" --parts graph,interleaved
for tokens in ${TOKENS:-4096 8192}; do
  bench "exchange_$tokens" --mode throughput --tokens "$tokens" --sms "$sms"
done
bench latency --mode latency --token-sweep "${DECODE:-1,16,64,128,256,512}"
exit $failed
