#!/usr/bin/env bash
# Instructions of a decode step of the whole engine, or of one token's sampling, vLLM's
# own beside ours, counted under emulation. Writes build/bench-step.json or bench-sampler.json.
#
#   scripts/bench_step.sh [--weights bf16 w8a8 w4a8 moe] [--sides ours upstream_eager upstream_default] [--top N]
#       [--async-scheduling]
#   scripts/bench_step.sh sampler [--no-peer]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$PROJECT"
bench=step
if [ "${1:-}" = sampler ]; then
    bench=sampler
    shift
fi
[ "$HOST_ARCH" != aarch64 ] || fail "instructions are counted by the emulator" "run make bench-$bench on x86-64"
[ "$(id -u)" = 0 ] || fail "what describes the emulated CPU is mounted over this machine's" "run it with sudo"
qemu-aarch64 -h | grep -q -- -plugin ||
    fail "this qemu-aarch64 takes no plugins (Debian 13's is linked statically)" "run make bench-$bench on Debian 12"

describe_cpu neoverse-v2
export bench midr flags PROJECT TOOLS ROOT VENV GUEST_PYTHON SITE BUILD
inside() {
    set -euo pipefail
    mount --make-rprivate /
    fake=$(mktemp -d)
    mount -t tmpfs tmpfs "$fake"
    # One CPU: a team of one thread has nobody to wait for, and counts are the same on every run.
    fake_machine "$fake/sys" "$fake/cpuinfo" 1
    for name in cpu node; do mount --bind "$fake/sys/devices/system/$name" "/sys/devices/system/$name"; done
    mount --bind "$fake/cpuinfo" /proc/cpuinfo
    exec taskset -c 0 "$TOOLS/bin/python" "benchmarks/bench_$bench.py" --root "$ROOT" --site "${VAC_BENCH_SITE:-$SITE}" \
        --packages "$VENV/lib/python$GUEST_PYTHON/site-packages" --output "$BUILD/bench-$bench.json" "$@"
}
export -f inside fake_machine
exec unshare --mount bash -c 'inside "$@"' bash "$@"
