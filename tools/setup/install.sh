#!/usr/bin/env bash
# Makes sure that the distribution packages which Ferry needs are there.
#
#   tools/setup/install.sh demo    what `make demo` needs
#   tools/setup/install.sh test    what `make test` needs (demo, and all that tests use)
#   tools/setup/install.sh docs    what `make docs` needs
#   tools/setup/install.sh windows what `make test STAGES=windows` needs besides
#   tools/setup/install.sh deb     what `make deb` needs
#
# It looks for the things themselves (commands, headers), not for packages, so it is quick when
# all is there and works on any distribution. What is missing is installed with apt when we are
# root or have sudo without a password (Debian 12, Ubuntu 24.04); otherwise it prints what is
# missing, the command that an administrator would run, and ends with 1.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tools/setup/probe.sh
source "$here/probe.sh"

profile=${1:-demo}
case $profile in
  demo | test | docs | windows | deb) ;;
  *)
    echo "install.sh: unknown profile '$profile'; expected demo, test, docs, windows or deb" >&2
    exit 2
    ;;
esac

# The stages of `make test` that a user without root may do without: one line each.
optional_stage() {
  case $1 in
    "Arm64 cross compiler" | "Arm64 emulator") echo arm64 ;;
    "clang with libFuzzer") echo fuzz ;;
    "advzip") echo "(smaller wheels)" ;;
    "SimGrid headers") echo "(ferry simulate)" ;;
    "Prometheus") echo "(metrics scraped by Prometheus)" ;;
    "etcd") echo "(ranks that meet in etcd)" ;;
    "libfabric headers" | "fi_info" | "ip") echo network ;;
  esac
}

collect_missing "$profile"
if ((${#missing_what[@]} == 0)); then
  exit 0
fi

as_root=()
may_install=no
if [[ $(id -u) == 0 ]]; then
  may_install=yes
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  as_root=(sudo -n)
  may_install=yes
fi

if [[ $may_install == yes ]] && command -v apt-get >/dev/null; then
  echo "setup: installing with apt-get: ${missing_packages[*]}"
  apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  # A foreign source that does not answer must not stop us: the install decides.
  "${apt[@]}" update >"$log" 2>&1 || tail -n 5 "$log" >&2
  if ! "${apt[@]}" install -y --no-install-recommends "${missing_packages[@]}" >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "setup: apt-get could not install: ${missing_packages[*]}" >&2
    exit 1
  fi
  collect_missing "$profile"
  if ((${#missing_what[@]} == 0)); then
    echo "setup: all distribution packages are there"
    exit 0
  fi
  echo "setup: still missing after the installation:" >&2
fi

required=0
skipped=()
for i in "${!missing_what[@]}"; do
  if [[ ${missing_what[$i]} == ccache ]]; then
    continue # only makes it quicker
  fi
  stage=$(optional_stage "${missing_what[$i]}")
  if [[ -n $stage && ${CI:-} != true ]]; then
    skipped+=("$stage")
  else
    required=1
  fi
done

echo "setup: this machine lacks, for \`make $profile\`:" >&2
for i in "${!missing_what[@]}"; do
  printf '  %-30s package: %s\n' "${missing_what[$i]}" "${missing_package_of[$i]}" >&2
done
cat >&2 <<EOF
An administrator installs them with
  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing_packages[*]}
EOF
if ! command -v apt-get >/dev/null; then
  echo "(Package names are those of Debian 12 and Ubuntu 24.04; this is another distribution.)" >&2
fi
if ((required)); then
  exit 1
fi
if ((${#skipped[@]})); then
  stages=$(printf '%s\n' "${skipped[@]}" | sort -u | xargs)
  echo "Going on without: the stages $stages will NOT be tested." >&2
fi
