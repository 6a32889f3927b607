#!/usr/bin/env bash
# Builds what is preloaded into vLLM's processes: libgomp with LSE atomics and
# mimalloc. The results are kept beside the environment, so that other clones
# find them, and copied into OUT_DIR.
#
#   scripts/build_libs.sh OUT_DIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

out="${1:?OUT_DIR}"
kept="$ENVIRONMENT/libs"
mkdir -p "$out" "$kept" "$BUILD"
sysroot=()
[ "$HOST_ARCH" = aarch64 ] || sysroot=(--sysroot "$ROOT")
start=$SECONDS
"$PROJECT/scripts/build_libgomp.sh" "$kept" "${sysroot[@]}" >"$BUILD/libgomp.log" 2>&1 ||
    { tail -n 15 "$BUILD/libgomp.log" >&2; fail "libgomp could not be built; the whole output is in build/libgomp.log"; }
PYTHON="$TOOLS/bin/python" "$PROJECT/scripts/build_mimalloc.sh" "$kept" "${sysroot[@]}" >"$BUILD/mimalloc.log" 2>&1 ||
    { tail -n 15 "$BUILD/mimalloc.log" >&2; fail "mimalloc could not be linked; the whole output is in build/mimalloc.log"; }
cp -p "$kept"/libgomp.so.1 "$kept"/libmimalloc.so "$kept"/*.txt "$out/"
touch "$out/libgomp.so.1" "$out/libmimalloc.so"
printf 'build: %-32s %4d s\n' "libgomp (LSE), mimalloc" $((SECONDS - start))
