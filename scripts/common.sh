# Shared by the scripts: where the Arm environment lies, messages, timed steps.
# Sourced, never run.

set -euo pipefail

PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HOST_ARCH="$(uname -m)"

# The Arm root is that of one Debian release whatever the host runs, so that
# every machine builds against the same C library and runs the same Python.
GUEST_SUITE=bookworm
GUEST_PYTHON=3.11
GUEST_PACKAGES=dash,bash,coreutils,grep,sed,python3,python3-venv,libgomp1,libnuma1,ca-certificates,procps,util-linux,strace,libc6-dev,libstdc++-12-dev,libgcc-12-dev

# What the environment is made from decides its name: another lock, another
# folder; a second clone with the same lock finds the first one's.
env_key() {
    { printf '%s\n' "$HOST_ARCH" "$GUEST_SUITE" "$GUEST_PYTHON" "$GUEST_PACKAGES"
      cat "$PROJECT"/requirements/*.lock; } | sha256sum | cut -c1-12
}

CACHE="${VAC_ENV_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vllm-arm-cpu}"
ENVIRONMENT="$CACHE/$(env_key)"
ROOT="$ENVIRONMENT/root"                   # the Arm root file system (x86-64 only)
TOOLS="$ENVIRONMENT/tools"                 # Python tools that run on this machine
BUILD="$PROJECT/build"
SITE="$BUILD/site"                         # this clone's wheel, installed

if [ "$HOST_ARCH" = aarch64 ]; then
    VENV="$ENVIRONMENT/venv"               # vLLM and all that it needs
else
    VENV="$ROOT/opt/venv"
fi

# fail WHAT FIX: one clear message, and what to do.
fail() {
    printf 'error: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  to fix: %s\n' "$2" >&2
    exit 1
}
