#!/usr/bin/env bash
# Installs packages for the Arm Python into build/NAME, beside the environment and not in it: for tests that want more
# than all others do. What is there is kept.
#
#   scripts/install_beside.sh NAME REQUIREMENT-OR-OPTION...
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

target="$BUILD/${1:?}"
shift
[ ! -e "$target" ] || exit 0
rm -rf "$target.new"
"$TOOLS/bin/uv" pip install -q "${ARM_PYTHON[@]}" --only-binary :all: --no-deps --target "$target.new" "$@"
mv "$target.new" "$target"
