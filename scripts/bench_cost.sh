#!/usr/bin/env bash
# Costs of the kernels, upstream's beside them: modelled cycles under emulation,
# wall time on a real Arm machine. Writes build/bench-cost.json.
#
#   scripts/bench_cost.sh [CASE...]
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$PROJECT"
if [ "$HOST_ARCH" = aarch64 ]; then
    exec scripts/arm.sh vllm-arm-cpu bench "$@"
fi

qemu-aarch64 -h | grep -q -- -plugin ||
    fail "this qemu-aarch64 takes no plugins (Debian 13's is linked statically)" "run make bench-cost on Debian 12"
exec "$TOOLS/bin/python" benchmarks/bench_cost.py --root "$ROOT" --site "$SITE" \
    --packages "$VENV/lib/python$GUEST_PYTHON/site-packages" --output "$BUILD/bench-cost.json" "$@"
