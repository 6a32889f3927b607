"""The kernels that can multiply by a dense weight: ours, oneDNN through vLLM's operators, torch.

Each holds a weight in one form, says why it does not take one, and can be
given new values for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_arm_cpu import envs
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, pointer, scratch
from vllm_arm_cpu.native.program import Program, Rows, Slot
from vllm_arm_cpu.runtime import memory

ORDER = ("vac", "onednn", "torch")
"""The candidates, the preferred first: ours reads rows back for lookups and writes FP32 logits."""

LinearCall = Callable[[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]
"""``call(x, weight, bias)``, as vLLM calls a layer's ``cpu_linear``."""


class PackedLinear:
    """A weight in the layout of our GEMM, and the call that multiplies by it.

    Args:
        weight: [N, K] of BF16, FP16 or FP32. It is read here and not kept.
        name: of the layer; calls that torch.compile traces find the weight by it.
    """

    def __init__(self, weight: torch.Tensor, name: str = "linear") -> None:
        lib = library.load()
        self.n, self.k = weight.shape
        self.dtype = weight.dtype
        code = DTYPES[weight.dtype]
        self.packed = memory.allocate(lib.vac_gemm_rhs_packed_size(code, self.n, self.k))
        self.nbytes = self.packed.numel()
        self.load(weight)

        self._call = Call(("vac_gemm", "vac_gemm_args"))
        self._args = self._call.args[0]
        self._args.dtype = code
        self._args.n, self._args.k = self.n, self.k
        self._args.rhs = pointer(self.packed)
        # The size does not grow beyond a few hundred rows.
        self._workspace_bytes = lib.vac_gemm_workspace_size(code, 1 << 16, self.n, self.k, lib.vac_max_threads())
        self._gather: Call | None = None
        self.handle = register_handle(self, name)

    def load(self, weight: torch.Tensor) -> None:
        """Pack other values of the same shape and dtype over these; whoever shares the weight sees them."""
        if (weight.shape, weight.dtype) != ((self.n, self.k), self.dtype):
            raise ValueError(
                f"a weight [{self.n}, {self.k}] of {self.dtype} cannot be replaced by {list(weight.shape)} of "
                f"{weight.dtype}"
            )
        weight = as_rows(weight)
        pack = Call(("vac_gemm_rhs_pack", "vac_gemm_rhs_pack_args"))
        args = pack.args[0]
        args.dtype, args.n, args.k = DTYPES[self.dtype], self.n, self.k
        args.rhs, args.rhs_stride = pointer(weight), weight.stride(0)
        args.packed = pointer(self.packed)
        pack.run()

    def another(self, weight: torch.Tensor, name: str) -> PackedLinear:
        """One of the same kind for another weight."""
        return PackedLinear(weight, name)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: x [..., K] -> [..., N] of x's dtype.

        ``weight`` is vLLM's placeholder of the released original.
        """
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.vac.linear(x, self.handle, bias)
            return result
        return self.run(x, bias, self.dtype)

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As the call, in FP32: the kernel's sums, not rounded to the model's dtype."""
        return self.run(x, bias, torch.float32)

    def run(self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        """x [..., K] -> [..., N] of ``out_dtype``: the weight's, or FP32."""
        if x.dtype != self.dtype:
            raise TypeError(f"input is {x.dtype}, the weight [{self.n}, {self.k}] was packed as {self.dtype}")
        rows = as_rows(x)
        out = torch.empty((rows.shape[0], self.n), dtype=out_dtype)
        args = self._args
        args.m = rows.shape[0]
        args.lhs, args.lhs_stride = pointer(rows), rows.stride(0)
        args.out, args.out_stride = pointer(out), self.n
        args.out_dtype = DTYPES[out_dtype]
        if bias is None:
            args.bias = library.ffi.NULL
        else:
            args.bias, args.bias_dtype = pointer(bias), DTYPES[bias.dtype]
        args.workspace = scratch.pointer(self._workspace_bytes)
        self._call.run()
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.n)

    quantization: Any = None
    """Programs hand its inputs over as they are."""

    def program_workspace(self, rows: int) -> int:
        """Bytes of workspace that :meth:`add_to` wants, for any number of rows."""
        return int(self._workspace_bytes)

    def add_to(
        self,
        program: Program,
        rows: Slot,
        x: Rows,
        out: Rows,
        bias: torch.Tensor | None,
        workspace: Slot,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """Append ``out = x @ weight.T + bias`` to a program.

        x: [rows, K]; out: [rows, N] of the weight's dtype or, as ``out_dtype``, FP32.
        """
        args = program.op("vac_gemm", "vac_gemm_args", m=rows, workspace=workspace, bias=bias)
        args.dtype, args.out_dtype = DTYPES[self.dtype], DTYPES[out_dtype or self.dtype]
        args.bias_dtype = DTYPES[self.dtype if bias is None else bias.dtype]
        args.n, args.k, args.rhs = self.n, self.k, pointer(self.packed)
        program.keep(self.packed)
        program.rows(args, "lhs", x, "lhs_stride")
        program.rows(args, "out", out, "out_stride")

    def add_embedding_to(self, program: Program, rows: Slot, ids: Slot, out: Rows, first_id: int = 0) -> None:
        """Append the lookup of int32 ids [rows] to a program: out [rows, K].

        first_id: that of the weight's first row; ids that it does not hold give rows of zeros.
        """
        args = program.op("vac_gemm_rhs_gather_rows", "vac_gemm_rhs_gather_rows_args", ids=ids, num_rows=rows)
        args.dtype, args.id_bytes, args.n, args.k = DTYPES[self.dtype], 4, self.n, self.k
        args.packed, args.first_id = pointer(self.packed), first_id
        program.keep(self.packed)
        program.rows(args, "out", out, "out_stride")

    def embedding(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the original weight, bit for bit: ids int32 or int64 [...] -> [..., K]."""
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.vac.embedding(ids, self.handle)
            return result
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


class OneDnnLinear:
    """A weight that vLLM's oneDNN operators have packed, ACL's kernels among them.

    Args:
        weight: [N, K]; it is not kept.

    Raises:
        RuntimeError: oneDNN has no primitive for it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.n, self.k = weight.shape
        self.dtype = weight.dtype
        self.nbytes = weight.numel() * weight.element_size()
        self._handler: Any = None
        self.load(weight)

    def load(self, weight: torch.Tensor) -> None:
        """Pack other values."""
        from vllm import _custom_ops as ops

        self._handler = ops.create_onednn_mm(weight.t(), 32)

    def another(self, weight: torch.Tensor, name: str) -> OneDnnLinear:
        """One of the same kind for another weight."""
        return OneDnnLinear(weight)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: x [..., K] -> [..., N]."""
        from vllm import _custom_ops as ops

        result: torch.Tensor = ops.onednn_mm(self._handler, x, bias)
        return result


def refusals(dtype: torch.dtype, n: int, k: int, looked_up: bool) -> dict[str, str]:
    """Candidate -> why it does not take a weight [n, k]; torch always does.

    ``looked_up``: rows of the weight are read as embeddings, too.
    """
    reasons = {}
    if dtype not in DTYPES:
        reasons["vac"] = f"no kernel for {dtype} weights"
    if envs.VAC_BLOCK_UPSTREAM_OPS or not hasattr(torch.ops._C, "create_onednn_mm_handler"):
        reasons["onednn"] = "this vLLM's compiled operators (vllm._C) are not loaded"
    elif dtype not in (torch.bfloat16, torch.float16, torch.float32):
        reasons["onednn"] = f"no primitive for {dtype} weights"
    elif k == 0 or n == 0:
        reasons["onednn"] = "the weight is empty"
    elif looked_up:
        reasons["onednn"] = "embeddings are looked up in this weight: it would be in memory twice"
    return reasons


def make(name: str, weight: torch.Tensor, layer: str) -> LinearCall:
    """The call of one candidate; ``weight`` [N, K] is needed afterwards by torch only."""
    if name == "vac":
        return PackedLinear(weight, layer)
    if name == "onednn":
        return OneDnnLinear(weight)
    linear: LinearCall = torch.nn.functional.linear
    return linear


def runner(name: str, weight: torch.Tensor) -> Callable[[int], None]:
    """A call that multiplies m rows by the weight, for measuring."""
    linear = make(name, weight, "measured")
    # Not torch's generator: measuring must not change what is sampled later.
    generator = torch.Generator().manual_seed(0)
    inputs: dict[int, torch.Tensor] = {}

    def run(m: int) -> None:
        if m not in inputs:
            inputs[m] = torch.randn(m, weight.shape[1], generator=generator).to(weight.dtype)
        linear(inputs[m], weight, None)

    return run


_by_handle: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register_handle(linear: Any, name: str) -> str:
    """A name that no other weight in memory has: a compiled graph holds names, not pointers.

    ``linear`` has ``n`` and ``run(x, bias, out_dtype)``, as PackedLinear.
    """
    handle, count = name, 1
    while handle in _by_handle:
        count += 1
        handle = f"{name}#{count}"
    _by_handle[handle] = linear
    return handle


def _linear(x: torch.Tensor, handle: str, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = _by_handle[handle].run(x, bias, x.dtype)
    return result


def _linear_fake(x: torch.Tensor, handle: str, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _by_handle[handle].n))


def _embedding(ids: torch.Tensor, handle: str) -> torch.Tensor:
    result: torch.Tensor = _by_handle[handle].embedding(ids)
    return result


def _embedding_fake(ids: torch.Tensor, handle: str) -> torch.Tensor:
    linear = _by_handle[handle]
    return ids.new_empty((*ids.shape, linear.k), dtype=linear.dtype)


# What torch.compile sees of us. The library object owns the operators.
_operators = torch.library.Library("vac", "FRAGMENT")
for _name, _function, _fake in (("linear", _linear, _linear_fake), ("embedding", _embedding, _embedding_fake)):
    direct_register_custom_op(_name, _function, fake_impl=_fake, target_lib=_operators, dispatch_key="CPU")
