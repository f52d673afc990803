# Sourced by the scripts of tools/: what they share. Sets ROOT, and use_torch sets TORCH, VENV and
# BUILD.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DEFAULT_TORCH=2.15.0

# Debian's ccache needs this to keep files that use a precompiled header.
export CCACHE_SLOPPINESS=pch_defines,time_macros

say() { printf '%s\n' "$*" >&2; }

# What is wrong with a command line or a machine, in one line.
fail() {
  say "tools/$(basename "$0"): $*"
  exit 2
}

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

# use_torch VERSION [SUFFIX]: names the environment and the build folder for a version of torch.
# Only the default version's go without its number.
use_torch() {
  TORCH=${1:-${FSDP_TORCH:-$DEFAULT_TORCH}}
  [[ $TORCH =~ ^2\.1[1-5]\.[0-9]+$ ]] ||
    fail "torch is a version from 2.11.0 to 2.15, such as $DEFAULT_TORCH, not $TORCH"
  local tail=-$TORCH
  [ "$TORCH" != "$DEFAULT_TORCH" ] || tail=
  VENV=$ROOT/.venv$tail
  BUILD=$ROOT/build$tail${2:-}
}

# use_build VERSION SANITIZE CUDA: the same for a build with sanitizers, or without CUDA; either may be empty.
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
  use_torch "$1" "$suffix"
}
