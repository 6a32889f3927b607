"""``--kv-cache-dtype int8``, a name that vLLM does not have.

vLLM checks the value against a fixed list, whose ``int8_per_token_head`` is
what our kernels store for it. Adds the short name to the command line's choices and
replaces it where ``vllm.engine.arg_utils`` resolves the value, in front of
that check. Can go once vLLM has the name, or takes a platform's formats.
"""

from __future__ import annotations

import argparse
from typing import Any

from vllm.engine import arg_utils

ALIASES = {"int8": "int8_per_token_head"}

_resolve = arg_utils.resolve_kv_cache_dtype_string


def resolve_kv_cache_dtype_string(kv_cache_dtype: str, model_config: Any) -> str:
    """As vLLM's, with our names replaced by its own."""
    return str(_resolve(ALIASES.get(kv_cache_dtype, kv_cache_dtype), model_config))


def apply(parser: argparse.ArgumentParser | None = None) -> None:
    """Take the names in this process, and in a parser's ``--kv-cache-dtype``."""
    arg_utils.resolve_kv_cache_dtype_string = resolve_kv_cache_dtype_string
    if parser is None:
        return
    for action in parser._actions:
        if "--kv-cache-dtype" in action.option_strings and action.choices is not None:
            action.choices = [*action.choices, *(name for name in ALIASES if name not in action.choices)]
