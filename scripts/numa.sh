#!/usr/bin/env bash
# Runs tests/numa on emulated machines with real NUMA nodes: Debian's arm64
# kernel in full-system emulation, which shares the Arm root and the clone.
#
#   scripts/numa.sh run MACHINE...            prepare; all tests, machine after machine (two, four: its nodes)
#   scripts/numa.sh boot ARG...               tests/numa/boot.py, told where things lie
#   scripts/numa.sh missing                   say what keeps this machine from it, if anything
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$PROJECT"
# Where the guest sees the clone. On aarch64 the machine's own root serves; nothing is written to it.
GUEST_ROOT=$ROOT INSIDE=/src GUEST_PATH=/opt/venv/bin
[ "$HOST_ARCH" != aarch64 ] || GUEST_ROOT=/ INSIDE=$PROJECT GUEST_PATH=$VENV/bin
export KERNEL GUEST_ROOT INSIDE

boot() {
    "$TOOLS/bin/python" tests/numa/boot.py --env PATH="$INSIDE/build/site/bin:$GUEST_PATH:/usr/bin:/bin:/usr/sbin:/sbin" \
        --env HOME=/root --env LANG=C.UTF-8 --env PYTHONPATH="$INSIDE/build/site:$INSIDE" --env PYTHONUNBUFFERED=1 \
        --env PYTHONSAFEPATH=1 --env OMP_WAIT_POLICY=passive --env OPENBLAS_NUM_THREADS=1 "$@"
}

# Packages are installed where that is possible: nothing is missing there.
missing() {
    if [ -e "$KERNEL/initrd.gz" ] && command -v qemu-system-aarch64 >/dev/null; then return; fi
    if ! command -v apt-get >/dev/null; then
        echo "no apt-get to install qemu-system-aarch64 and Debian's arm64 kernel with"
    elif [ "$(id -u)" != 0 ]; then
        echo "only root can install qemu-system-aarch64 and Debian's arm64 kernel"
    fi
}

run() {
    local machine failed=''
    # Four nodes have twice the cores, on as many real ones.
    local -A seconds=([two]=720 [four]=1440)
    scripts/env.sh numa
    for machine in "$@"; do
        echo "--- machine with $machine nodes"
        boot --count-traffic --timeout "${seconds[$machine]}" "$machine" \
            python3 -m pytest -p no:cacheprovider --durations 5 tests/numa || failed+=" $machine"
    done
    [ -z "$failed" ] || fail "tests failed on the machines:$failed" "read the output above"
}

case "${1:?}" in
boot | run) "$@" ;;
missing) missing ;;
*) fail "unknown command $1" "see the head of $0" ;;
esac
