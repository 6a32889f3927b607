#!/bin/bash
# Builds libgomp.so.1 for aarch64 with LSE atomics from GCC's own source: the
# libgomp inside torch's wheels spins on LDXR/STXR pairs.
set -euo pipefail

usage() {
    cat <<'USAGE'
Usage: build_libgomp.sh OUT_DIR [--sysroot DIR] [--source TARBALL]

Writes OUT_DIR/libgomp.so.1 and OUT_DIR/libgomp.txt (what it was built from).
  --sysroot DIR     an aarch64 root with libc6-dev, instead of the compiler's own
  --source TARBALL  a gcc-*.tar.xz; default: Debian's gcc-*-source package
Does nothing when OUT_DIR already holds the library of the same inputs.
Environment: CC (default: aarch64-linux-gnu-gcc on other machines, gcc on aarch64).
USAGE
}

fail() { echo "build_libgomp: $*" >&2; exit 1; }

out='' sysroot='' source=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --sysroot) sysroot=${2:?--sysroot needs a directory}; shift 2 ;;
        --source) source=${2:?--source needs a file}; shift 2 ;;
        -*) usage >&2; exit 2 ;;
        *) [ -z "$out" ] || { usage >&2; exit 2; }; out=$1; shift ;;
    esac
done
[ -n "$out" ] || { usage >&2; exit 2; }
[ -z "$sysroot" ] || [ -d "$sysroot" ] || fail "--sysroot $sysroot: no such directory"
[ -z "$source" ] || [ -f "$source" ] || fail "--source $source: no such file"

if [ "$(uname -m)" = aarch64 ]; then prefix=''; else prefix=aarch64-linux-gnu-; fi
CC=${CC:-${prefix}gcc}
command -v "${CC%% *}" > /dev/null || fail "$CC not found: apt-get install gcc-aarch64-linux-gnu (aarch64: gcc)"
for tool in make xz tar "${prefix}readelf" "${prefix}objdump" "${prefix}strip"; do
    command -v "$tool" > /dev/null || fail "$tool not found: apt-get install make xz-utils tar binutils${prefix:+-aarch64-linux-gnu}"
done

mkdir -p "$out"
out=$(cd "$out" && pwd)
[ -z "$sysroot" ] || sysroot=$(cd "$sysroot" && pwd)
[ -z "$source" ] || source=$(realpath "$source")

# --- the source -------------------------------------------------------------
package=''
if [ -z "$source" ]; then
    command -v apt-get > /dev/null || fail "no apt-get here: give GCC's source with --source gcc-VERSION.tar.xz"
    # The newest one that the distribution has: 12 on Debian 12, 14 on Debian 13.
    package=$(apt-cache pkgnames gcc- | grep -E '^gcc-(1[2-9]|2[0-9])-source$' | sort -V | tail -n 1) || true
    [ -n "$package" ] || fail "no gcc-*-source package known: run apt-get update, or give --source gcc-VERSION.tar.xz"
    # awk reads to the end: leaving early would kill apt-cache under pipefail.
    version=$(apt-cache show "$package" | awk '/^Version:/ && !v {v = $2} END {print v}')
    described="Debian source package $(apt-cache show "$package" | awk '/^Source:/ && !s {s = $2} END {print s}') (binary package $package $version)"
else
    described="$(basename "$source") sha256 $(sha256sum "$source" | cut -d' ' -f1)"
fi

flags="-O2 -g0 -fPIC -march=armv8.2-a+lse -mno-outline-atomics -D_GNU_SOURCE"
stamp_text=$(printf '%s\n' "$described" "$flags" "$($CC --version | head -n 1)" "sysroot $sysroot" "$(sha256sum < "$0")")
if [ -f "$out/libgomp.so.1" ] && [ -f "$out/libgomp.txt" ] && [ "$(cat "$out/libgomp.stamp" 2> /dev/null)" = "$stamp_text" ]; then
    echo "libgomp.so.1 is up to date ($described)"
    exit 0
fi

# Beside the result, so that an interrupted run neither fills /tmp nor leaves half a library.
work=$(mktemp -d "$out/.libgomp.XXXXXX")
trap 'rm -rf "$work"' EXIT
log=$out/libgomp.log
: > "$log"

if [ -n "$package" ]; then
    # _apt cannot write into a private directory and apt says so at length; only failure matters.
    (cd "$work" && apt-get download "$package=$version") >> "$log" 2>&1 ||
        { tail -n 5 "$log" >&2; fail "apt-get download $package failed: check the network, run apt-get update"; }
    dpkg-deb -x "$work"/*.deb "$work/deb"
    source=$(find "$work/deb/usr/src" -maxdepth 2 -name 'gcc-*.tar.*' -print -quit)
    [ -n "$source" ] || fail "no tarball in $package"
    described="$described, $(basename "$source") sha256 $(sha256sum "$source" | cut -d' ' -f1)"
fi

# libgomp's configure reads only these of GCC's tree.
mkdir "$work/src" "$work/build"
tar -xf "$source" -C "$work/src" --strip-components=1 --no-anchored --wildcards --no-wildcards-match-slash \
    '*/libgomp' '*/config' '*/include' '*/config.guess' '*/config.sub' '*/config-ml.in' \
    '*/install-sh' '*/ltmain.sh' '*/missing' '*/mkinstalldirs' '*/move-if-change' '*/depcomp' '*/compile' \
    '*/libtool.m4' '*/BASE-VER' >> "$log" 2>&1 || fail "cannot unpack $source (see $log)"
[ -x "$work/src/libgomp/configure" ] || fail "$source holds no libgomp/configure"

# --- build ------------------------------------------------------------------
# C libraries since 2.38 turn strtoul into __isoc23_strtoul@GLIBC_2.38 under _GNU_SOURCE,
# which would shut out every older system for two functions that parse OMP_* variables.
cat > "$work/compat.h" <<'HEADER'
#include <features.h>
#undef __GLIBC_USE_ISOC2X
#define __GLIBC_USE_ISOC2X 0
#undef __GLIBC_USE_ISOC23
#define __GLIBC_USE_ISOC23 0
#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0
HEADER

export CC="$CC${sysroot:+ --sysroot=$sysroot}"
# FC=no: no Fortran modules, whatever the machine has.
# Chained, because a list before || runs without the shell's -e.
(
    cd "$work/build" &&
    FC=no CFLAGS="$flags -include $work/compat.h -ffile-prefix-map=$work=." LDFLAGS="-Wl,-z,relro,-z,now -Wl,--as-needed" \
        "$work/src/libgomp/configure" --host=aarch64-linux-gnu --build="$("$work/src/config.guess")" \
        --disable-multilib --disable-static --enable-shared --disable-werror --disable-dependency-tracking &&
    make -j"$(nproc)"
) >> "$log" 2>&1 || { tail -n 20 "$log" >&2; fail "the build failed, see $log"; }
library=$(readlink -f "$work/build/.libs/libgomp.so.1")
[ -f "$library" ] || fail "the build made no libgomp.so.1, see $log"
"${prefix}strip" --strip-unneeded -o "$work/libgomp.so.1" "$library"

# --- verify -----------------------------------------------------------------
dynamic=$("${prefix}readelf" -dW "$work/libgomp.so.1")
soname=$(sed -n 's/.*SONAME.*\[\(.*\)\].*/\1/p' <<< "$dynamic")
[ "$soname" = libgomp.so.1 ] || fail "SONAME is '$soname', not libgomp.so.1"
needed=$(sed -n 's/.*NEEDED.*\[\(.*\)\].*/\1/p' <<< "$dynamic" | xargs)
[ "$needed" = libc.so.6 ] || fail "NEEDED is '$needed', not libc.so.6 alone"
glibc=$("${prefix}readelf" -VW "$work/libgomp.so.1" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
[ "$(printf '%s\n' "$glibc" GLIBC_2.34 | sort -V | tail -n 1)" = GLIBC_2.34 ] || fail "needs $glibc, more than GLIBC_2.34"
"${prefix}objdump" -d --no-show-raw-insn "$work/libgomp.so.1" > "$work/asm"
lse=$(grep -cE $'\t(cas|casp|swp|ld(add|clr|set|eor|[su](max|min))|st(add|clr|set|eor))(a|al|l)?[bh]?\t' "$work/asm" || true)
exclusive=$(grep -cE $'\t(ld|st)a?l?xp?r?[bh]?\t' "$work/asm" || true)
[ "$lse" -gt 0 ] || fail "no LSE atomics in the library"
[ "$exclusive" = 0 ] || fail "$exclusive exclusive loads/stores (LDXR/STXR) in the library"

cat > "$work/libgomp.txt" <<TEXT
libgomp.so.1: GNU Offloading and Multi Processing Runtime Library, unmodified
source: $described
license: GPL-3.0-or-later WITH GCC-exception-3.1
compiler: $($CC --version | head -n 1)
flags: $flags
atomics: $lse LSE, $exclusive exclusive
requires: $needed, $glibc
TEXT
mv "$work/libgomp.txt" "$out/libgomp.txt"
mv "$work/libgomp.so.1" "$out/libgomp.so.1"
printf '%s\n' "$stamp_text" > "$out/libgomp.stamp"
rm -f "$log"
cat "$out/libgomp.txt"
