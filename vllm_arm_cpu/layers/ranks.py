"""The tensor-parallel ranks of a model inside op lists: sums of partial results, and columns put together.

The group's shared memory belongs to its communicator
(``vllm_arm_cpu/executor/communicator.py``); what is appended here runs on the
same segment, in the order in which the modules would have called it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_arm_cpu.layers import norm
from vllm_arm_cpu.native.call import DTYPES
from vllm_arm_cpu.native.program import Program, Rows, Slot


class Ranks:
    """The ranks over which a model's layers are divided, as one of them sees them.

    Attributes:
        world_size: how many they are.
        rank: which one this is.
        usable: whether op lists can exchange data: one rank alone needs not, several do it in shared memory.
    """

    def __init__(self) -> None:
        group = get_tp_group()
        self.world_size, self.rank = group.world_size, group.rank_in_group
        communicator = group.device_communicator if self.world_size > 1 else None
        # Made by all ranks together, when it is first asked for: here, at the end of loading.
        self._segment: Any = getattr(communicator, "segment", None)
        self.usable = self.world_size == 1 or self._segment is not None

    def check(self) -> None:
        """Behind a program with collectives.

        Raises:
            RankLostError: a rank has ended or hangs; what the program wrote is undefined.
        """
        if self._segment is not None:
            self._segment.check()

    def bias_of(self, linear: Any) -> torch.Tensor | None:
        """The bias that this rank adds to a row-parallel layer's partial result: one of them does."""
        return linear.bias if self.rank == 0 else None

    def add_all_reduce(self, program: Program, dtype: torch.dtype, tokens: Slot, size: int, x: Slot) -> None:
        """Append ``x = sum over ranks of x``, contiguous [tokens, size]; nothing for one rank."""
        if self.world_size > 1:
            args = program.op("vac_all_reduce", "vac_all_reduce_args", num_rows=tokens, out=x)
            program.fill(args, **{"in": x})
            args.communicator, args.row_size, args.dtype = self._segment.communicator, size, DTYPES[dtype]

    def add_all_reduce_norm(
        self, program: Program, module: Any, dtype: torch.dtype, tokens: Slot, x: Slot, out: Rows, residual: Rows
    ) -> bool:
        """Append ``residual += sum over ranks of x; out = norm(residual)``, x contiguous.

        False, and nothing appended, where there is nothing to sum, or a row is larger than a slot of the segment.
        """
        weight = module.weight.data
        size = weight.shape[0]
        if self.world_size == 1 or size * dtype.itemsize > self._segment.slot_bytes:
            return False
        name = "vac_all_reduce_rms_norm"
        args = program.op(name, f"{name}_args", num_tokens=tokens, weight=weight)
        program.fill(args, **{"in": x})
        args.communicator, args.hidden_size, args.dtype = self._segment.communicator, size, DTYPES[dtype]
        norm.set_weight(args, module)
        program.rows(args, "out", out, "out_token_stride")
        program.rows(args, "residual", residual, "residual_token_stride")
        return True

    def add_all_gather(self, program: Program, rows: Slot, columns: int, x: Rows, out: Slot) -> None:
        """Append the ranks' FP32 columns side by side: x [rows, columns] -> out [rows, world_size * columns]."""
        args = program.op("vac_all_gather", "vac_gather_args", num_rows=rows, out=out)
        program.fill(args, **{"in": (x.base, x.offset)})
        assert isinstance(x.stride, int)
        args.communicator, args.row_bytes, args.in_row_stride = self._segment.communicator, columns * 4, x.stride * 4
        args.out_rank_stride, args.out_row_stride = columns * 4, columns * 4 * self.world_size
