"""vLLM's device communicator over libvac's collectives, for ranks on one machine.

What they do not have (other data types, ranks on several machines) goes through
torch.distributed with gloo. Upstream's shared-memory operators (vllm._C) are
never called.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.logger import init_logger

from vllm_arm_cpu import envs
from vllm_arm_cpu.envs import format_cpu_list
from vllm_arm_cpu.executor.segment import Segment
from vllm_arm_cpu.native.call import DTYPES, Call, pointer
from vllm_arm_cpu.runtime import numa

logger = init_logger("vllm.arm_cpu.communicator")

_LARGEST_SLOT = 2 << 20
_SMALLEST_SLOT = 64 << 10
_ONE_THREAD_BYTES = 32 << 10
"""Shorter messages, all ranks' together, are not worth waking the team."""


class ArmCpuCommunicator(CpuCommunicator):
    """Collectives of one group of ranks.

    Every method is called by all ranks of the group with equal shapes. They run
    on the calling thread's OpenMP team.

    Raises (all collectives):
        RankLostError: another rank has died or hangs.
    """

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
        **kwargs: Any,
    ) -> None:
        # CpuCommunicator's constructor would take upstream's shared-memory operators where they exist.
        DeviceCommunicatorBase.__init__(
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all, **kwargs
        )
        self.dist_module = dist
        self.supports_tensor_dict = False
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)
        self._slot_bytes = _slot_bytes()
        self._segment: Segment | None = None
        self._segment_made = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; the same bits on every rank for BF16, FP16 and FP32."""
        segment = self.segment
        if segment is None or input_.dtype not in DTYPES or not input_.is_contiguous():
            dist.all_reduce(input_, group=self.device_group)
            return input_
        args = self._reduce.args[0]
        args.out = pointer(input_)
        setattr(args, "in", args.out)
        args.num_rows, args.row_size, args.dtype = 1, input_.numel(), DTYPES[input_.dtype]
        self._run(self._reduce, segment, input_.nbytes)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors side by side in dimension ``dim``."""
        segment = self.segment
        if segment is None:
            return super().all_gather(input_, dim)
        output = self._gathered(input_, dim)
        self._gather_into(self._all_gather, segment, input_, output, dim, 0)
        return output

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """As :meth:`all_gather`, on rank ``dst`` of the group alone; None on the others."""
        segment = self.segment
        if segment is None:
            result: torch.Tensor | None = super().gather(input_, dst, dim)
            return result
        output = self._gathered(input_, dim) if self.rank_in_group == dst else None
        self._gather_into(self._gather, segment, input_, output, dim, dst)
        return output

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank ``src``'s tensor into everyone's."""
        segment = self.segment
        if segment is None or not tensor.is_contiguous():
            return super().broadcast(tensor, src)
        args = self._broadcast.args[0]
        args.buffer, args.num_bytes, args.root = pointer(tensor), tensor.nbytes, src
        self._run(self._broadcast, segment, tensor.nbytes)
        return tensor

    def destroy(self) -> None:
        """Stop watching the other ranks: they may end now."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        super().destroy()

    @property
    def segment(self) -> Segment | None:
        """The group's segment, None without shared memory; all ranks come here first together, and make it."""
        if self._segment_made:
            return self._segment
        self._segment_made = True

        def exchange(value: Any) -> list[Any]:
            values: list[Any] = [None] * self.world_size
            dist.all_gather_object(values, value, group=self.cpu_group)
            return values

        try:
            segment = Segment(
                self.unique_name,
                self.rank_in_group,
                self.world_size,
                self._slot_bytes,
                exchange,
                envs.VAC_RANK_TIMEOUT,
                _place(),
            )
        except OSError as error:
            logger.warning("group %s exchanges data through gloo: %s", self.unique_name, error)
            return None
        self._reduce = Call(("vac_all_reduce", "vac_all_reduce_args"))
        self._all_gather = Call(("vac_all_gather", "vac_gather_args"))
        self._gather = Call(("vac_gather", "vac_gather_args"))
        self._broadcast = Call(("vac_broadcast", "vac_broadcast_args"))
        for call in (self._reduce, self._all_gather, self._gather, self._broadcast):
            call.args[0].communicator = segment.communicator
        self._segment = segment
        return segment

    def _run(self, call: Call, segment: Segment, num_bytes: int) -> None:
        # One thread or the whole team: libgomp ends threads that a smaller team leaves over.
        call.run(1 if num_bytes * self.world_size <= _ONE_THREAD_BYTES else 0)
        segment.check()

    def _gathered(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        shape = list(input_.shape)
        shape[dim] *= self.world_size
        return torch.empty(shape, dtype=input_.dtype, device=input_.device)

    def _gather_into(
        self, call: Call, segment: Segment, input_: torch.Tensor, output: torch.Tensor | None, dim: int, root: int
    ) -> None:
        input_ = input_.contiguous()
        dim %= input_.dim()
        args = call.args[0]
        args.out = pointer(output)
        setattr(args, "in", pointer(input_))
        args.num_rows = math.prod(input_.shape[:dim])
        args.row_bytes = args.in_row_stride = args.out_rank_stride = (
            math.prod(input_.shape[dim:]) * input_.element_size()
        )
        args.out_row_stride = args.row_bytes * self.world_size
        args.root = root
        self._run(call, segment, input_.nbytes)


def _place() -> str:
    """Where this rank is, for messages."""
    plan = numa.inherited()
    return f"node {plan.node}, CPUs {format_cpu_list(plan.threads.cpus)}" if plan is not None else "no fixed place"


def _slot_bytes() -> int:
    """As large as the largest message of a step, but no larger than is good for the caches."""
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return _LARGEST_SLOT
    tokens = config.scheduler_config.max_num_batched_tokens
    size = (
        tokens * config.model_config.get_hidden_size() * torch.empty((), dtype=config.model_config.dtype).element_size()
    )
    return max(_SMALLEST_SLOT, min(_LARGEST_SLOT, int(size)))
