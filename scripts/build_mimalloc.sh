#!/bin/bash
# Links libmimalloc.so for aarch64 from the object file in the PyPI package
# cmeel-mimalloc. Its own shared library needs libatomic.so.1, which slim images
# lack: preloaded there, it would kill every process.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: build_mimalloc.sh OUT_DIR [--object FILE] [--sysroot DIR]

Writes OUT_DIR/libmimalloc.so and OUT_DIR/libmimalloc.txt (what it was made from).
  --object FILE   an aarch64 mimalloc.o; default: that of cmeel-mimalloc, which is
                  fetched with pip when the machine has no unpacked copy
  --sysroot DIR   an aarch64 root with libc6-dev, instead of the compiler's own
Does nothing when OUT_DIR already holds the library of the same inputs.
Environment: CC (default: aarch64-linux-gnu-gcc on other machines, gcc on aarch64),
PYTHON (default: python3).
USAGE
}

fail() { echo "build_mimalloc: $*" >&2; exit 1; }

# The release whose object was checked: symbols, C library version, behaviour under vLLM.
requirement=cmeel-mimalloc==3.4.3

out='' object='' sysroot=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --object) object=${2:?--object needs a file}; shift 2 ;;
        --sysroot) sysroot=${2:?--sysroot needs a directory}; shift 2 ;;
        -*) usage >&2; exit 2 ;;
        *) [ -z "$out" ] || { usage >&2; exit 2; }; out=$1; shift ;;
    esac
done
[ -n "$out" ] || { usage >&2; exit 2; }
[ -z "$sysroot" ] || [ -d "$sysroot" ] || fail "--sysroot $sysroot: no such directory"
[ -z "$object" ] || [ -f "$object" ] || fail "--object $object: no such file"

if [ "$(uname -m)" = aarch64 ]; then prefix=''; else prefix=aarch64-linux-gnu-; fi
CC=${CC:-${prefix}gcc}
PYTHON=${PYTHON:-python3}
command -v "${CC%% *}" > /dev/null || fail "$CC not found: apt-get install gcc-aarch64-linux-gnu (aarch64: gcc)"
for tool in "${prefix}readelf" "${prefix}strip"; do
    command -v "$tool" > /dev/null || fail "$tool not found: apt-get install binutils${prefix:+-aarch64-linux-gnu}"
done
mkdir -p "$out"
out=$(cd "$out" && pwd)

described=$requirement
[ -z "$object" ] || described="$(basename "$object") sha256 $(sha256sum "$object" | cut -d' ' -f1)"
stamp_text=$(printf '%s\n' "$described" "$($CC --version | head -n 1)" "sysroot $sysroot" "$(sha256sum < "$0")")
if [ -f "$out/libmimalloc.so" ] && [ -f "$out/libmimalloc.txt" ] &&
    [ "$(cat "$out/libmimalloc.stamp" 2> /dev/null)" = "$stamp_text" ]; then
    echo "libmimalloc.so is up to date ($described)"
    exit 0
fi

work=$(mktemp -d "$out/.libmimalloc.XXXXXX")
trap 'rm -rf "$work"' EXIT

if [ -z "$object" ]; then
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" --only-binary :all: \
        --platform manylinux_2_28_aarch64 "$requirement" > "$work/pip.log" 2>&1 ||
        { cat "$work/pip.log" >&2; fail "cannot fetch $requirement: check the network, or give --object mimalloc.o"; }
    "$PYTHON" -m zipfile -e "$work"/*.whl "$work/wheel"
    object=$(find "$work/wheel" -name mimalloc.o)
    [ -f "$object" ] || fail "$requirement holds no mimalloc.o"
    described="$described, mimalloc.o sha256 $(sha256sum "$object" | cut -d' ' -f1)"
fi
"${prefix}readelf" -h "$object" 2> /dev/null | grep -q 'Machine:.*AArch64' || fail "$object is not an aarch64 object file"

$CC ${sysroot:+--sysroot="$sysroot"} -shared -Wl,-soname,libmimalloc.so -Wl,-z,relro,-z,now -Wl,-z,defs -Wl,--as-needed \
    -o "$work/libmimalloc.so" "$object" || fail "cannot link $object"
"${prefix}strip" --strip-unneeded "$work/libmimalloc.so"

dynamic=$("${prefix}readelf" -dW "$work/libmimalloc.so")
soname=$(sed -n 's/.*SONAME.*\[\(.*\)\].*/\1/p' <<< "$dynamic")
[ "$soname" = libmimalloc.so ] || fail "SONAME is '$soname', not libmimalloc.so"
needed=$(sed -n 's/.*NEEDED.*\[\(.*\)\].*/\1/p' <<< "$dynamic" | xargs)
[ "$needed" = libc.so.6 ] || fail "NEEDED is '$needed', not libc.so.6 alone"
glibc=$("${prefix}readelf" -VW "$work/libmimalloc.so" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
[ "$(printf '%s\n' "$glibc" GLIBC_2.34 | sort -V | tail -n 1)" = GLIBC_2.34 ] || fail "needs $glibc, more than GLIBC_2.34"
symbols=$("${prefix}readelf" --dyn-syms -W "$work/libmimalloc.so" | awk '$7 != "UND" {print $8}')
# Half an allocator is worse than none: memory of one would be freed by the other.
for symbol in malloc free calloc realloc posix_memalign aligned_alloc memalign malloc_usable_size strdup _Znwm _ZdlPv; do
    grep -qx "$symbol" <<< "$symbols" || fail "the library does not export $symbol"
done

cat > "$work/libmimalloc.txt" <<TEXT
libmimalloc.so: mimalloc, unmodified
source: $described
license: MIT
requires: $needed, $glibc
TEXT
mv "$work/libmimalloc.txt" "$out/libmimalloc.txt"
mv "$work/libmimalloc.so" "$out/libmimalloc.so"
printf '%s\n' "$stamp_text" > "$out/libmimalloc.stamp"
cat "$out/libmimalloc.txt"
