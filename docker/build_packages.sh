#!/bin/sh
# Installs what the stage that builds needs: on aarch64 a compiler, elsewhere a
# cross compiler and the C library of Arm.
set -eu
export DEBIAN_FRONTEND=noninteractive
packages="ca-certificates python3 python3-venv make xz-utils dpkg-dev"
if [ "$(uname -m)" = aarch64 ]; then
    packages="$packages gcc g++ libc6-dev"
else
    dpkg --add-architecture arm64
    packages="$packages clang-19 lld-19 llvm-19 gcc-aarch64-linux-gnu
        libc6-dev:arm64 libgcc-12-dev:arm64 libstdc++-12-dev:arm64 libgomp1:arm64"
fi
apt-get update
# The lists stay: GCC's source comes from there, too.
# shellcheck disable=SC2086
apt-get install -y --no-install-recommends $packages
