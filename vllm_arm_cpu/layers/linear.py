"""Dense linear layers: packed once at load, the original released.

vLLM calls :func:`prepare_linear` for every unquantized linear, lm_head and
embedding layer once its weights are loaded (see ``compat/linear_dispatch.py``)
and then ``layer.cpu_linear(x, weight, bias)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_arm_cpu import envs
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, pointer, scratch
from vllm_arm_cpu.runtime import memory

logger = init_logger("vllm.arm_cpu.linear")

upstream_dispatch: Callable[[torch.nn.Module, bool], None] | None = None
"""vLLM's own dispatch, for weights that are not matrices; set by the patch that replaces it."""


class PackedLinear:
    """A weight in the layout of our GEMM, and the call that multiplies by it.

    Args:
        weight: [N, K] of BF16, FP16 or FP32, unit column stride. It is read
            here and not kept.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        lib = library.load()
        self.n, self.k = weight.shape
        self.dtype = weight.dtype
        code = DTYPES[weight.dtype]
        weight = as_rows(weight)
        self.packed = memory.allocate(lib.vac_gemm_rhs_packed_size(code, self.n, self.k))
        pack = Call(("vac_gemm_rhs_pack", "vac_gemm_rhs_pack_args"))
        args = pack.args[0]
        args.dtype, args.n, args.k = code, self.n, self.k
        args.rhs, args.rhs_stride = pointer(weight), weight.stride(0)
        args.packed = pointer(self.packed)
        pack.run()

        self._call = Call(("vac_gemm", "vac_gemm_args"))
        self._args = self._call.args[0]
        self._args.dtype = self._args.out_dtype = code
        self._args.n, self._args.k = self.n, self.k
        self._args.rhs = pointer(self.packed)
        # The size does not grow beyond a few hundred rows.
        self._workspace_bytes = lib.vac_gemm_workspace_size(code, 1 << 16, self.n, self.k, lib.vac_max_threads())
        self._gather: Call | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: x [..., K] -> [..., N] of x's dtype.

        ``weight`` is vLLM's placeholder of the released original.
        """
        if x.dtype != self.dtype:
            raise TypeError(f"input is {x.dtype}, the weight [{self.n}, {self.k}] was packed as {self.dtype}")
        rows = as_rows(x)
        out = torch.empty((rows.shape[0], self.n), dtype=self.dtype)
        args = self._args
        args.m = rows.shape[0]
        args.lhs, args.lhs_stride = rows_pointer(rows)
        args.out, args.out_stride = pointer(out), self.n
        if bias is None:
            args.bias = library.ffi.NULL
        else:
            args.bias, args.bias_dtype = pointer(bias), DTYPES[bias.dtype]
        args.workspace = scratch.pointer(self._workspace_bytes)
        self._call.run()
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.n)

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the original weight, bit for bit: ids int32 or int64 [...] -> [..., K]."""
        if self._gather is None:
            self._gather = Call(("vac_gemm_rhs_gather_rows", "vac_gemm_rhs_gather_rows_args"))
            args = self._gather.args[0]
            args.dtype, args.n, args.k = DTYPES[self.dtype], self.n, self.k
            args.packed = pointer(self.packed)
        args = self._gather.args[0]
        ids = ids.contiguous()
        out = torch.empty((ids.numel(), self.k), dtype=self.dtype)
        args.ids, args.id_bytes, args.num_rows = pointer(ids), ids.element_size(), ids.numel()
        args.out, args.out_stride = pointer(out), self.k
        self._gather.run()
        return out.view(*ids.shape, self.k)


def rows_pointer(rows: torch.Tensor) -> tuple[Any, int]:
    """Pointer and row stride of a [rows, columns] tensor."""
    return pointer(rows), rows.stride(0)


class PackOnFirstUse:
    """For an embedding that may or may not be multiplied by: packs when it is.

    Some models use their embedding layer as lm_head without a layer of its own.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        pack_shared(self._layer)
        result: torch.Tensor = self._layer.cpu_linear(x, weight, bias)
        return result


def refuse(weight: torch.Tensor) -> str | None:
    """Why our kernels do not take a weight, or None."""
    if envs.VAC_LINEAR == "torch":
        return "VAC_LINEAR=torch"
    if weight.dtype not in DTYPES:
        return f"no kernel for {weight.dtype} weights"
    return None


def prepare_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Give a layer its ``cpu_linear`` after its weight was loaded.

    ``remove_weight`` is vLLM's word for a plain linear layer; embeddings and
    lm_head come with False.
    """
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2:
        # A missing pipeline stage, or a convolution or expert weight.
        assert upstream_dispatch is not None
        upstream_dispatch(layer, remove_weight)
        return
    reason = refuse(weight)
    if reason is not None:
        logger.info_once("linear layers run on torch: %s", reason)
        layer.cpu_linear = torch.nn.functional.linear
    elif remove_weight:
        layer.cpu_linear = PackedLinear(weight.data)
        release(layer)
    else:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        # Layers that share the parameter find each other through it.
        sharing = weight.__dict__.setdefault("vac_sharing_layers", [])
        sharing.append(layer)
        layer.cpu_linear = PackOnFirstUse(layer)
        if any(isinstance(member, ParallelLMHead) for member in sharing):
            pack_shared(layer)


def pack_shared(layer: torch.nn.Module) -> None:
    """Pack a weight once for all layers that share it: lookup and lm_head read one copy."""
    sharing = layer.weight.__dict__.get("vac_sharing_layers", [layer])
    packed = PackedLinear(layer.weight.data)
    for member in sharing:
        member.cpu_linear = packed
    release(layer)


def release(layer: torch.nn.Module) -> None:
    """Free a weight that was packed; the parameter stays, empty, where vLLM looks for it."""
    layer.weight.data = torch.empty(0, dtype=layer.weight.dtype)
