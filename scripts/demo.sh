#!/usr/bin/env bash
# Serves a model on Arm, asks it something, shows doctor's table and the times.
#
#   scripts/demo.sh MODEL_DIR PROMPT
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

model="${1:?MODEL_DIR}" prompt="${2:?PROMPT}"
[ -f "$model/config.json" ] || fail "no Hugging Face checkpoint in $model (config.json is missing)" "give MODEL=/path/to/checkpoint"
[ "$HOST_ARCH" = aarch64 ] && path=$(readlink -f "$model") || path=/mnt/model
exec "$PROJECT/scripts/arm.sh" --timeout 1500 --model "$model" python3 scripts/demo.py "$path" "$prompt"
