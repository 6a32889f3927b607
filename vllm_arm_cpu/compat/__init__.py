"""What vLLM has no hook for: one file per patch, each with its reason and its end.

A patch module says what it replaces, why, and when it can go; a test fails
once it can (``tests/integration/test_compat.py``).
"""

from __future__ import annotations


def apply() -> None:
    """Apply every patch; calling it again changes nothing."""
    from vllm_arm_cpu.compat import (
        awq_layout,
        draft_tables,
        int4_parameters,
        linear_dispatch,
        moe_methods,
        queue_wait,
        sampler_ops,
    )

    awq_layout.apply()
    draft_tables.apply()
    int4_parameters.apply()
    moe_methods.apply()
    linear_dispatch.apply()
    queue_wait.apply()
    sampler_ops.apply()
