#!/usr/bin/env bash
# Builds the wheel into dist/, cross-compiled on x86-64, and checks it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$PROJECT"
mkdir -p "$BUILD"
start=$SECONDS
export PATH="$TOOLS/bin:$PATH" VAC_BUILD_LIBS="$PROJECT/prebuilt"
[ "$HOST_ARCH" = aarch64 ] || export VAC_BUILD_SYSROOT="$ROOT"
rm -rf build/lib build/lib.* build/bdist.* ./*.egg-info
"$TOOLS/bin/python" -m build --wheel --no-isolation --outdir dist . >"$BUILD/wheel.log" 2>&1 ||
    { tail -n 30 "$BUILD/wheel.log" >&2; fail "the wheel could not be built; the whole output is in build/wheel.log"; }
# A wheel that is wrong must not lie there as if it were built.
"$TOOLS/bin/python" scripts/check_wheel.py dist/vllm_arm_cpu-*.whl || { rm -f dist/vllm_arm_cpu-*.whl; exit 1; }
printf 'build: %-32s %4d s\n' "wheel" $((SECONDS - start))
