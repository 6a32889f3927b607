#!/usr/bin/env bash
# Installs the wheel for this clone: into build/site, which arm.sh puts in
# front of the environment that all clones share.
#
#   scripts/install_wheel.sh WHEEL
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

rm -rf "$SITE"
target=(--target "$SITE")
[ "$HOST_ARCH" = aarch64 ] || target+=(--python-platform aarch64-manylinux_2_36 --python-version "$GUEST_PYTHON")
"$TOOLS/bin/uv" pip install --quiet --no-deps "${target[@]}" "${1:?WHEEL}"
# Whichever environment it is run in: arm.sh puts its Python first in PATH.
for script in "$SITE"/bin/*; do sed -i '1s|^#!.*|#!/usr/bin/env python3|' "$script"; done
touch "$SITE/.installed"
