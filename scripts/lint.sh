#!/usr/bin/env bash
# Checks the sources: ruff (lint and format), mypy --strict on the package,
# clang-format, shellcheck where it is installed.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$PROJECT"
status=0
python_sources=(vllm_arm_cpu tests benchmarks scripts setup.py)
"$TOOLS/bin/ruff" check --quiet "${python_sources[@]}" || status=1
"$TOOLS/bin/mypy" --cache-dir "$BUILD/mypy" || status=1
mapfile -t native_sources < <(find csrc -name '*.cc' -o -name '*.h')
if command -v clang-format-19 >/dev/null; then
    clang-format-19 --dry-run -Werror "${native_sources[@]}" || status=1
else
    echo "lint: clang-format-19 is not installed, C++ sources not checked"
fi
if command -v shellcheck >/dev/null; then shellcheck -x -e SC1091 scripts/*.sh || status=1; fi
exit $status
