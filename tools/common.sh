# Sourced by the scripts of tools/: what they share. Sets ROOT, and use_torch sets TORCH, VENV and
# BUILD.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DEFAULT_TORCH=2.15.0

# Debian's ccache needs this to keep files that use a precompiled header.
export CCACHE_SLOPPINESS=pch_defines,time_macros
export CCACHE_PCH_EXTSUM=1  # test/support/pch writes the checksum
# What one clone has compiled, another one in another folder takes, too; meson.build leaves the folder out of objects.
export CCACHE_BASEDIR=$ROOT

say() { printf '%s\n' "$*" >&2; }

# What is wrong with a command line or a machine, in one line.
fail() {
  say "tools/$(basename "$0"): $*"
  exit 2
}

# What --version prints. meson.build holds the version; headers, packages and programs have it from there.
version() { sed -n "s/^  version: '\(.*\)',$/libfsdp \1/p" "$ROOT/meson.build"; }

# The value of an option: `value=$(option_value "$@")` for both "--name value" and "--name=value".
option_value() {
  case $1 in
    *=*) printf '%s' "${1#*=}" ;;
    *)
      [ $# -gt 1 ] || fail "$1 needs a value"
      printf '%s' "$2"
      ;;
  esac
}

# use_torch VERSION [SUFFIX] [--cpu]: names the environment and the build folder for a version of torch.
# Only the default version's go without its number; those of torch's wheel for CPUs end in -cpu.
use_torch() {
  TORCH=${1:-${FSDP_TORCH:-$DEFAULT_TORCH}}
  [[ $TORCH =~ ^2\.1[1-5]\.[0-9]+$ ]] ||
    fail "torch is a version from 2.11.0 to 2.15, such as $DEFAULT_TORCH, not $TORCH"
  local tail=-$TORCH
  [ "$TORCH" != "$DEFAULT_TORCH" ] || tail=
  [ -z "${3:-}" ] || tail+=-cpu
  VENV=$ROOT/.venv$tail
  BUILD=$ROOT/build$tail${2:-}
}

# use_build VERSION SANITIZE CUDA [--cpu]: the same for a build with sanitizers, or without CUDA; either may be empty.
use_build() {
  local suffix=
  case $2 in
    '') ;;
    address,undefined | thread) suffix=-${2//,/-} ;;
    *) fail "--sanitize is address,undefined or thread, not $2" ;;
  esac
  case $3 in
    enabled | auto) ;;
    disabled) suffix+=-no-cuda ;;
    *) fail "--cuda is enabled, disabled or auto, not $3" ;;
  esac
  use_torch "$1" "$suffix" "${4:-}"
}

# run LOG COMMAND...: its output goes to LOG, which is shown if it fails.
run() {
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    tail -n 40 "$log" >&2
    say "tools/$(basename "$0"): failed: $*"
    say "tools/$(basename "$0"): all of its output is in $log"
    exit 1
  fi
}

# Installs those of the packages that are missing, as root; else it names the command.
install_debian_packages() {
  local installed name missing=()
  installed=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' "$@" 2>/dev/null |
    sed -n 's/^ii *//p') || true  # dpkg-query fails if it does not know one
  for name in "$@"; do
    grep -qx "$name" <<<"$installed" || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    fail "needs Debian packages; run: sudo apt-get install ${missing[*]}"
  fi
  say "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # Without a set-up's lock: an installation may start services, which stay.
  run "$ROOT/.cache/apt-update.log" apt-get -o DPkg::Lock::Timeout=600 update 9>&-
  run "$ROOT/.cache/apt-install.log" apt-get -o DPkg::Lock::Timeout=600 install --yes \
    --no-install-recommends "${missing[@]}" 9>&-
}
