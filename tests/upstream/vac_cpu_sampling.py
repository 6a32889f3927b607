"""vLLM's sampling operators for CPUs, as its tests call them, on the functions that take their place in the engine."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import torch

from vllm_arm_cpu.native.call import as_rows
from vllm_arm_cpu.sampling import sampler


def greedy_argmax(logits: torch.Tensor) -> torch.Tensor:
    """FP32 [requests, vocab] -> int64 [requests]."""
    return sampler.greedy_sample(logits)


def fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """FP32 [requests, vocab], int64 seeds [requests] -> int64 [requests]."""
    return sampler.gumbel_sample(as_rows(logits), seeds.contiguous())


def install() -> None:
    """Put both before vLLM's operators, and let tests import the module that brings these."""
    for function in (greedy_argmax, fused_gumbel_argmax):
        setattr(torch.ops._C, function.__name__, function)
    try:
        import_module("vllm._C")
    except ImportError:
        # A vLLM without compiled operators. Whoever asks whether it has them looks at the operators.
        sys.modules["vllm._C"] = ModuleType("vllm._C")
