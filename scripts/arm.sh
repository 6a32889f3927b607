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
[ -e "$VENV/bin/vllm" ] || fail "the Arm environment is not there" "run 'make env'"

# MIDR_EL1 (implementer, part), the /proc/cpuinfo flags and QEMU's model of a core.
base='fp asimd evtstrm aes pmull sha1 sha2 crc32'
v82="$base atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
v9="$v82 sha3 sha512 asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp flagm2 frint i8mm bf16 sve"
case "${cpu:=neoverse-v2}" in
neoverse-v2) midr=0x410fd4f0 flags="$v9 sve2" qemu=max,sve128=on,sme=off ;;
neoverse-n2) midr=0x410fd490 flags="$v9 sve2" qemu=max,sve128=on,sme=off ;;
neoverse-v1) midr=0x411fd401 flags="$v9" qemu=max,sve256=on,sme=off ;;
neoverse-n1) midr=0x413fd0c1 flags="$v82 ssbs" qemu=neoverse-n1 ;;
cortex-a72) midr=0x410fd083 flags="$base cpuid" qemu=cortex-a72 ;;
*) fail "unknown CPU '$cpu'" "one of neoverse-v2, neoverse-v1, neoverse-n2, neoverse-n1, cortex-a72" ;;
esac

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

    # torch, the doctor and vLLM read these to learn which core they are on.
    local cpus last i key value sys="$ROOT/sys/devices/system"
    cpus=$(nproc --all); last=$((cpus - 1))
    mount -t tmpfs -o mode=755 tmpfs "$ROOT/sys"
    mkdir -p "$sys/cpu" "$sys/node/node0"
    for key in possible present online; do echo "0-$last" >"$sys/cpu/$key"; done
    : >"$ROOT/dev/cpuinfo"
    for ((i = 0; i < cpus; i++)); do
        mkdir -p "$sys/cpu/cpu$i/regs/identification" "$sys/cpu/cpu$i/topology"
        printf '0x%016x\n' "$midr" >"$sys/cpu/cpu$i/regs/identification/midr_el1"
        echo "$i" >"$sys/cpu/cpu$i/topology/core_id"
        echo 0 >"$sys/cpu/cpu$i/topology/physical_package_id"
        echo "$i" >"$sys/cpu/cpu$i/topology/thread_siblings_list"
        printf 'processor\t: %d\nBogoMIPS\t: 2000.00\nFeatures\t: %s\nCPU implementer\t: 0x%02x\nCPU architecture: 8\nCPU variant\t: 0x%x\nCPU part\t: 0x%03x\nCPU revision\t: %d\n\n' \
            "$i" "$flags" $((midr >> 24)) $(((midr >> 20) & 15)) $(((midr >> 4) & 0xfff)) $((midr & 15)) >>"$ROOT/dev/cpuinfo"
    done
    mount --bind "$ROOT/dev/cpuinfo" "$ROOT/proc/cpuinfo"
    echo 0 >"$sys/node/online"; echo 0 >"$sys/node/possible"
    echo "0-$last" >"$sys/node/node0/cpulist"; echo 10 >"$sys/node/node0/distance"
    while read -r key value _; do echo "Node 0 $key $value kB"; done </proc/meminfo |
        grep -E ' (MemTotal|MemFree|Active\(file\)|Inactive\(file\)|SReclaimable):' >"$sys/node/node0/meminfo"

    exec env -i PATH=/src/build/site/bin:/opt/venv/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LANG=C.UTF-8 \
        TERM="${TERM:-dumb}" PYTHONPATH=/src/build/site QEMU_CPU="$qemu" VAC_EMULATED_CPU="$cpu" HF_HUB_OFFLINE=1 \
        VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 $(env | grep -E '^(CI|VAC_TEST_[A-Z_]*|PYTEST_[A-Z_]*)=' || true) \
        chroot "$ROOT" /bin/bash -c 'cd /src && exec "$@"' bash "$@"
}
export -f inside
exec ${timeout:+timeout -k 20 "$timeout"} unshare --mount --pid --ipc --fork --kill-child bash -c 'inside "$@"' bash "$@"
