#!/usr/bin/env bash
# Runs a command on Arm: in the emulated root on x86-64, in the venv on aarch64.
# The project lies at /src inside the root; what mounts and processes the
# command leaves behind end with it.
#
#   scripts/arm.sh [--cpu NAME] [--timeout SECONDS] [--model DIR] COMMAND ARG...
#
# NAME: neoverse-v2 (default), neoverse-v1, neoverse-n2, neoverse-n1, cortex-a72.
# It picks what the emulator and the machine's own description show; on a
# real Arm machine it must be left out. DIR appears as /mnt/model.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cpu='' timeout='' model=''
while [ $# -gt 0 ]; do
    case "$1" in
    --cpu) cpu=$2; shift 2 ;;
    --timeout) timeout=$2; shift 2 ;;
    --model) model=$(readlink -f "$2"); [ -d "$model" ] || fail "no such folder: $2"; shift 2 ;;
    --) shift; break ;;
    -*) fail "unknown option $1" ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || fail "no command given" "see the head of $0"

if [ "$HOST_ARCH" = aarch64 ]; then
    [ -z "$cpu" ] || fail "--cpu $cpu: this machine has a CPU of its own" "leave --cpu out"
    [ -x "$VENV/bin/python3" ] || fail "the Arm environment is not there" "run 'make env'"
    export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}" PATH="$SITE/bin:$VENV/bin:$PATH"
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
    [ -z "$model" ] || export VAC_DEMO_MODEL="$model"
    cd "$PROJECT"
    exec ${timeout:+timeout -k 20 "$timeout"} "$@"
fi

[ "$(id -u)" = 0 ] || fail "entering the emulated Arm environment needs root" "run it with sudo"
[ -e "$VENV/bin/python3" ] || [ -L "$VENV/bin/python3" ] || fail "the Arm environment is not there" "run 'make env'"

describe_cpu "${cpu:=neoverse-v2}"

# Everything below happens in namespaces of its own: mounts and leftover
# processes vanish with the command.
export cpu midr flags qemu model ROOT PROJECT
inside() {
    set -euo pipefail
    mount --make-rprivate /
    mount -t proc proc "$ROOT/proc"
    mount -t tmpfs -o mode=755 tmpfs "$ROOT/dev"
    for node in null zero full random urandom tty; do
        touch "$ROOT/dev/$node"; mount --bind "/dev/$node" "$ROOT/dev/$node"
    done
    ln -s /proc/self/fd "$ROOT/dev/fd"; ln -s fd/0 "$ROOT/dev/stdin"; ln -s fd/1 "$ROOT/dev/stdout"; ln -s fd/2 "$ROOT/dev/stderr"
    mkdir "$ROOT/dev/shm"; mount -t tmpfs -o mode=1777 tmpfs "$ROOT/dev/shm"
    mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
    mount --bind "$PROJECT" "$ROOT/src"
    [ -z "$model" ] || mount --bind "$model" "$ROOT/mnt/model"
    [ ! -e /etc/resolv.conf ] || cat /etc/resolv.conf >"$ROOT/etc/resolv.conf"

    mount -t tmpfs -o mode=755 tmpfs "$ROOT/sys"
    fake_machine "$ROOT/sys" "$ROOT/dev/cpuinfo" "$(nproc --all)"
    mount --bind "$ROOT/dev/cpuinfo" "$ROOT/proc/cpuinfo"

    # What tests are told; a value may hold spaces.
    local passed=()
    mapfile -t passed < <(env | grep -E '^(CI|VAC_TEST_[A-Z_]*|PYTEST_ADDOPTS)=' || true)
    exec env -i PATH=/src/build/site/bin:/opt/venv/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LANG=C.UTF-8 \
        TERM="${TERM:-dumb}" PYTHONPATH=/src/build/site QEMU_CPU="$qemu" VAC_EMULATED_CPU="$cpu" HF_HUB_OFFLINE=1 \
        VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 "${passed[@]}" \
        chroot "$ROOT" /bin/bash -c 'cd /src && exec "$@"' bash "$@"
}
export -f inside fake_machine
exec ${timeout:+timeout -k 20 "$timeout"} unshare --mount --pid --ipc --fork --kill-child bash -c 'inside "$@"' bash "$@"
