#!/usr/bin/env bash
# Prepares the Arm environment: a Debian arm64 root under QEMU on x86-64, a
# plain venv on aarch64. Idempotent and resumable: each step leaves a stamp of
# what it was made from, and is run again only when that changed.
#
#   scripts/env.sh            prepare
#   scripts/env.sh path       print the environment's folder
#   scripts/env.sh numa       prepare, and what emulates a machine of several NUMA nodes too
#
# VLLM=0.33 in the environment: an environment of its own for that version.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

STAMPS="$ENVIRONMENT/stamps"
LOG="$ENVIRONMENT/log"
NEEDED_GIB=9
AGAIN="make env"

# step NAME INPUT FUNCTION: run FUNCTION unless NAME's stamp says it was done
# with the same INPUT; print one line with its time.
step() {
    local name=$1 input=$2 function=$3 start=$SECONDS stamp
    stamp="$STAMPS/$(printf '%s' "$name" | tr ' /' '__')"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$input" ] && [ -n "$input" ]; then return; fi
    rm -f "$stamp"
    printf 'env: %-34s ' "$name"
    # Not in a condition: there `set -e` would not end the function at its first error.
    set +e
    ( set -e; "$function" ) >"$LOG" 2>&1
    local status=$?
    set -e
    if [ $status -ne 0 ]; then
        printf 'FAILED after %d s\n' $((SECONDS - start))
        tail -n 15 "$LOG" | sed 's/^/  | /' >&2
        explain "$name"
    fi
    printf '%4d s\n' $((SECONDS - start))
    printf '%s' "$input" >"$stamp"
}

# What usually lies behind a failed step.
explain() {
    if grep -qiE 'no space left' "$LOG"; then
        fail "the disk is full" "free space under $CACHE, or set VAC_ENV_CACHE to a folder with $NEEDED_GIB GiB free"
    elif grep -qiE 'temporary failure|could not resolve|name or service|network is unreachable|connection (refused|timed out)|failed to (fetch|connect)|dns error' "$LOG"; then
        fail "$1: the network cannot be reached" "check the connection and the proxy settings of apt and pip, then run '$AGAIN' again: it goes on where it stopped"
    fi
    fail "$1 failed; the whole output is in $LOG" "mend what it says and run '$AGAIN' again: it goes on where it stopped"
}

check_machine() {
    [ "$(uname -s)" = Linux ] || fail "this is $(uname -s)" "use Linux on aarch64 or x86-64 (a virtual machine will do)"
    case "$HOST_ARCH" in
    aarch64) NEEDED_GIB=8 ;;
    x86_64)
        local id='' version=''
        if [ -r /etc/os-release ]; then
            id=$(. /etc/os-release; echo "${ID:-}"); version=$(. /etc/os-release; echo "${VERSION_ID:-}")
        fi
        case "$id-$version" in
        debian-12 | debian-13) ;;
        *) [ -n "${VAC_ENV_ANY_DISTRIBUTION:-}" ] ||
            fail "unknown distribution '$id $version': Debian 12 and 13 are known to work" \
                "use one of them (a container with --privileged will do), or set VAC_ENV_ANY_DISTRIBUTION=1 if apt-get brings: $HOST_PACKAGES" ;;
        esac
        [ "$(id -u)" = 0 ] || fail "the emulated Arm environment needs root (chroot, mount, binfmt_misc)" "run it with sudo"
        ;;
    *) fail "no way to run aarch64 code on $HOST_ARCH" "use an aarch64 or x86-64 machine" ;;
    esac
    mkdir -p "$STAMPS" 2>/dev/null || fail "cannot write to $CACHE" "set VAC_ENV_CACHE to a folder that can be written"
    if [ ! -e "$STAMPS/vLLM" ]; then
        local free
        free=$(df --output=avail -BG "$CACHE" | tail -n 1 | tr -dc 0-9)
        [ "$free" -ge "$NEEDED_GIB" ] ||
            fail "$CACHE has $free GiB free, the environment needs $NEEDED_GIB" "free some space, or set VAC_ENV_CACHE to another folder"
    fi
}

# What only the emulated NUMA machine needs: of this machine, and of Debian's for Arm. Its modules stand in the order
# in which they need each other; those that are missing are built in.
NUMA_PACKAGES="qemu-system-arm mmdebstrap cpio gcc"
KERNEL_PACKAGES=linux-image-arm64,busybox-static
KERNEL_MODULES="virtio virtio_ring virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci netfs fscache 9pnet 9pnet_virtio 9p overlay"
HOST_PACKAGES="qemu-user qemu-user-static mmdebstrap clang-19 lld-19 llvm-19 clang-format-19 gcc make gcc-aarch64-linux-gnu g++-aarch64-linux-gnu xz-utils dpkg-dev python3-venv util-linux mount debian-archive-keyring ca-certificates"

missing_packages() {
    local package
    for package in "$@"; do
        # qemu-user-static is a virtual package on Debian 13, where qemu-user provides it.
        dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed' || printf '%s ' "$package"
    done
}

install_packages() {
    local missing
    read -ra missing < <(missing_packages "$@"; echo)
    [ ${#missing[@]} -gt 0 ] || return 0
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install -y --no-install-recommends "${missing[@]}"
}
# shellcheck disable=SC2086
install_host_packages() { install_packages $HOST_PACKAGES; }
# shellcheck disable=SC2086
install_numa_packages() { install_packages $NUMA_PACKAGES; }

vllm_installer() { "$PROJECT/scripts/install_vllm.sh" "$@"; }
make_tools() { vllm_installer tools; }
install_requirements() { vllm_installer requirements; }
install_vllm() { vllm_installer vllm; }

static_qemu() {
    local binary
    for binary in /usr/bin/qemu-aarch64-static /usr/bin/qemu-aarch64; do
        if [ -x "$binary" ] && ! readelf -l "$binary" | grep -q 'Requesting program interpreter'; then
            echo "$binary"; return
        fi
    done
    return 1
}

# Whether some entry, ours or a package's, runs aarch64 programs inside a chroot too.
binfmt_registered() {
    local entry
    for entry in /proc/sys/fs/binfmt_misc/*; do
        [ -e "$entry" ] || continue
        case "${entry##*/}" in register | status) continue ;; esac
        if grep -q '^enabled' "$entry" && grep -q '^flags:.*F' "$entry" &&
            grep -q '^magic 7f454c460201010000000000000000000200b7' "$entry"; then return; fi
    done
    return 1
}

register_binfmt() {
    local directory=/proc/sys/fs/binfmt_misc magic mask
    [ -e $directory/register ] || mount -t binfmt_misc binfmt_misc $directory
    binfmt_registered && return
    # The ELF header of a 64-bit little-endian executable or shared object for
    # machine 0xb7; flags: open the interpreter now (F: it works inside a
    # chroot too), keep argv[0] and credentials (O, C).
    magic='\x7f\x45\x4c\x46\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    printf '%s' ":vac-aarch64:M::$magic:$mask:$(static_qemu):OCF" >$directory/register
}

make_root() {
    rm -rf "$ROOT" "$ROOT.new"
    mmdebstrap --arch=arm64 --variant=extract --include="$GUEST_PACKAGES" "$GUEST_SUITE" "$ROOT.new"
    mkdir -p "$ROOT.new"/{proc,sys,dev,tmp,run,src,opt,mnt/model}
    printf 'root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n' >"$ROOT.new/etc/passwd"
    printf 'root:x:0:\nnogroup:x:65534:\n' >"$ROOT.new/etc/group"
    printf '127.0.0.1 localhost\n::1 localhost\n' >"$ROOT.new/etc/hosts"
    # For programs that run without chroot (qemu -L looks here first); inside a
    # chroot arm.sh mounts over it.
    describe_cpu neoverse-v2
    mkdir -p "$ROOT.new/proc" "$ROOT.new/sys"
    fake_machine "$ROOT.new/sys" "$ROOT.new/proc/cpuinfo" "$(nproc --all)"
    mv "$ROOT.new" "$ROOT"
}

# The first import compiles some 10,000 files under emulation: do it here, if
# this machine has a Python that writes the same bytecode.
compile_bytecode() {
    vllm_installer bytecode vllm torch transformers numpy pydantic openai anthropic fastapi sympy numba llvmlite aiohttp mcp
}

# Debian's arm64 kernel, and a first file system that mounts what the emulator shares.
make_kernel() {
    local unpacked="$ENVIRONMENT/kernel.unpacked" new="$ENVIRONMENT/kernel.new" module file
    rm -rf "$unpacked" "$new"
    mmdebstrap --arch=arm64 --variant=extract --include="$KERNEL_PACKAGES" "$GUEST_SUITE" "$unpacked"
    mkdir -p "$new" "$new/initrd"/{bin,dev,modules,proc,root,sys}
    cp "$unpacked"/boot/vmlinuz-* "$new/vmlinuz"
    cp "$unpacked/bin/busybox" "$new/initrd/bin/"
    for module in $KERNEL_MODULES; do
        file=$(find "$unpacked/lib/modules" -name "$module.ko")
        [ -n "$file" ] || continue
        cp "$file" "$new/initrd/modules/"
        echo "$module.ko" >>"$new/initrd/modules/order"
    done
    install -m 755 "$PROJECT/tests/numa/init" "$new/initrd/init"
    (cd "$new/initrd" && find . | cpio --quiet -o -H newc | gzip -1) >"$new/initrd.gz"
    rm -rf "$unpacked" "$new/initrd" "$KERNEL"
    mv "$new" "$KERNEL"
}

if [ "${1:-}" = path ]; then echo "$ENVIRONMENT"; exit; fi
check_machine
mkdir -p "$STAMPS"
exec 9>"$ENVIRONMENT/lock"
flock 9                                    # two clones may prepare the same environment at once
lock_sum=$(sha256sum "$PROJECT/requirements/$REQUIREMENTS_LOCK" | cut -c1-16)
if [ "$HOST_ARCH" = x86_64 ]; then
    # shellcheck disable=SC2086
    [ -z "$(missing_packages $HOST_PACKAGES)" ] || rm -f "$STAMPS/packages_of_this_machine"
    step "packages of this machine" "$HOST_PACKAGES" install_host_packages
fi
step "Python tools" "$(sha256sum "$PROJECT/requirements/tools.lock" | cut -c1-16)" make_tools
if [ "$HOST_ARCH" = x86_64 ]; then
    binfmt_registered || rm -f "$STAMPS/emulation_of_aarch64"
    step "emulation of aarch64" "binfmt $(static_qemu || true)" register_binfmt
    step "Arm root file system" "$GUEST_SUITE $GUEST_PACKAGES" make_root
fi
step "torch and other requirements" "$lock_sum" install_requirements
step "vLLM" "$lock_sum $(cat "$PROJECT/requirements/$VLLM_LOCK" | sha256sum | cut -c1-16)" install_vllm
[ "$HOST_ARCH" = aarch64 ] || step "bytecode" "$lock_sum" compile_bytecode
if [ "${1:-}" = numa ]; then
    AGAIN="make test-numa"
    # shellcheck disable=SC2086
    if [ -n "$(missing_packages $NUMA_PACKAGES)" ]; then
        rm -f "$STAMPS/emulator_of_machines"
        [ "$(id -u)" = 0 ] || fail "missing packages: $(missing_packages $NUMA_PACKAGES)" "install them, or run it as root"
    fi
    step "emulator of machines" "$NUMA_PACKAGES" install_numa_packages
    step "Arm kernel" "$GUEST_SUITE $KERNEL_PACKAGES $KERNEL_MODULES $(sha256sum "$PROJECT/tests/numa/init" | cut -c1-16)" make_kernel
fi
printf 'env: ready in %s\n' "$ENVIRONMENT"
