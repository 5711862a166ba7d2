#!/usr/bin/env bash
# Builds the Python package with the command line and installs it into .venv, with a count of the
# steps. build/python keeps the objects; everything that was said is in build/logs/package-build.log.
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

echo 'building the Python package and the command line into .venv'
if ! .venv/bin/python -m pip install --verbose --disable-pip-version-check --no-build-isolation \
  --no-deps --force-reinstall --config-settings=build-dir=build/python \
  --config-settings=cmake.define.FERRY_TOOLS=ON . 2>&1 | tee "$log" | show_steps; then
  tail -n 60 "$log" >&2
  echo "the build failed; all of its output: $log" >&2
  exit 1
fi
