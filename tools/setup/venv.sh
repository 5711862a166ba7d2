#!/usr/bin/env bash
# Makes or completes the private virtual environment `.venv`; installs nothing outside it.
#
#   tools/setup/venv.sh demo   what `make demo` needs, torch included
#   tools/setup/venv.sh dev    that, and what tests, lint and docs need
#   tools/setup/venv.sh lint   what `make lint` and `make format` need alone
#
# TORCH_INDEX_URL: the index that torch is taken from (e.g. a CPU build:
# https://download.pytorch.org/whl/cpu). PYTHON: the interpreter to build on.
# Quick when done: a stamp holds the checksum of the pins that were installed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck source=tools/setup/probe.sh
source "$here/probe.sh"
venv=$root/.venv

profile=${1:-demo}
case $profile in
  demo | dev) files=("requirements-$profile.txt" requirements-torch.txt) ;;
  lint) files=(requirements-lint.txt) ;;
  *)
    echo "venv.sh: unknown profile '$profile'; expected demo, dev or lint" >&2
    exit 2
    ;;
esac

if ! python=$(find_python); then
  echo "setup: no Python >= 3.11 with venv and headers; packages: python3 python3-venv python3-dev" >&2
  exit 1
fi
if [[ -e $venv ]] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "setup: .venv does not work (its Python is gone, or it was moved); making it anew"
  rm -rf "$venv"
fi
if [[ ! -e $venv ]]; then
  echo "setup: making .venv from $python"
  "$python" -m venv "$venv"
fi

wanted=$(cd "$here" && cat requirements-*.txt constraints.txt | sha256sum)" ${TORCH_INDEX_URL:-}"
stamp=$venv/.ferry-$profile
for done_already in "$stamp" "$venv/.ferry-dev"; do  # dev holds all the others
  if [[ -r $done_already && $(<"$done_already") == "$wanted" ]]; then
    exit 0
  fi
done
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off)
for file in "${files[@]}"; do
  echo "setup: installing $file into .venv"
  index=()
  if [[ $file == requirements-torch.txt ]]; then
    if [[ -n ${TORCH_INDEX_URL:-} ]]; then
      index=(--index-url "$TORCH_INDEX_URL")
    fi
  else
    index=(--constraint "$here/constraints.txt")
  fi
  "${pip[@]}" --quiet "${index[@]}" -r "$here/$file"
done
echo "$wanted" >"$stamp"
