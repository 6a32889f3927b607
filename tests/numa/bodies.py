"""What ranks do in the tests, in their own processes: sent to them by name, so nothing of pytest is imported here."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from tests.kernels import numa_ranks
from tests.kernels.support import DTYPES, encode, ffi, kernel, lib, pointer, run
from tests.numa.ranks import Member
from tests.numa.tiny_llama import TinyLlama, arena
from vllm_arm_cpu.runtime import memory

BF16 = DTYPES["bf16"]
N, K, M = 3000, 1024, 4
KV_HEADS, HEAD_SIZE, BLOCK, BLOCKS = 2, 64, 16, 1024
COLLECTIVES_SLOT = 1 << 17


def place(array: np.ndarray) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def work(member: Member) -> dict[str, tuple[int, int]]:
    """Load a weight, fill a KV cache, run a layer: (address, bytes) of what came into being."""
    team = member.plan.threads.num_threads
    rng = np.random.default_rng(member.rank)
    weight = encode(rng.standard_normal((N, K)).astype(np.float32), "bf16")
    packed = arena(lib.vac_gemm_rhs_packed_size(BF16, N, K))
    pack = ffi.new("vac_gemm_rhs_pack_args *", {"dtype": BF16, "n": N, "k": K, "rhs_stride": K})
    pack.rhs, pack.packed = pointer(weight), pointer(packed)
    run(kernel("gemm_rhs_pack"), pack, team)

    tokens = BLOCK * BLOCKS
    page = lib.vac_kv_cache_page_size(lib.VAC_KV_SAME, BF16, HEAD_SIZE, HEAD_SIZE, BLOCK)
    cache = arena(BLOCKS * KV_HEADS * page)
    keys = np.zeros((tokens, KV_HEADS, HEAD_SIZE), np.uint16)
    slots = rng.permutation(tokens).astype(np.int64)
    write = ffi.new("vac_kv_cache_write_args *")
    write.key = write.value = pointer(keys)
    write.kv_cache, write.slot_mapping = pointer(cache), pointer(slots)
    write.key_token_stride = write.value_token_stride = KV_HEADS * HEAD_SIZE
    write.key_head_stride = write.value_head_stride = HEAD_SIZE
    write.cache_block_stride, write.cache_head_stride = KV_HEADS * page // 2, page // 2
    write.num_tokens, write.num_kv_heads, write.block_size = tokens, KV_HEADS, BLOCK
    write.head_size = write.v_head_size = HEAD_SIZE
    write.dtype, write.cache_format = BF16, lib.VAC_KV_SAME
    run(kernel("kv_cache_write"), write, team)

    lhs = encode(rng.standard_normal((M, K)).astype(np.float32), "bf16")
    out = np.empty((M, N), np.uint16)
    scratch = np.empty(lib.vac_gemm_workspace_size(BF16, M, N, K, team) + (1 << 20), np.uint8)
    scratch[:] = 1
    gemm = ffi.new("vac_gemm_args *", {"dtype": BF16, "out_dtype": BF16, "m": M, "n": N, "k": K})
    gemm.lhs, gemm.rhs, gemm.out, gemm.workspace = map(pointer, (lhs, packed, out, scratch))
    gemm.lhs_stride, gemm.out_stride = K, N
    run(kernel("gemm"), gemm, team)
    member.kept["memory"] = {"weight": packed, "KV cache": cache, "scratch": scratch, "checkpoint": weight}
    return {name: place(array) for name, array in member.kept["memory"].items()}


def share(member: Member, slot_bytes: int) -> tuple[int, int]:
    """Make a segment: where it is mapped, and its size."""
    segment = member.segment(slot_bytes)
    return int(ffi.cast("uintptr_t", segment.pointer)), int(lib.vac_segment_size(member.world_size, slot_bytes))


def touch_from(member: Member, cpus: tuple[int, ...]) -> tuple[int, int]:
    """New memory that is first touched while the thread runs elsewhere."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        # Not from the heap, which may hold pages that were touched before.
        array = np.frombuffer(mmap.mmap(-1, 1 << 22), np.uint8)
        array[:] = 1
    finally:
        os.sched_setaffinity(0, own)
    member.kept["elsewhere"] = array
    return place(array)


def misplace(member: Member, node: int) -> tuple[int, int]:
    """Memory bound to another node on purpose."""
    member.kept["misplaced"], start = memory.map_aligned(1 << 22)
    array = np.frombuffer(member.kept["misplaced"], np.uint8)[start : start + (1 << 22)]
    memory.bind_range(*place(array), [node])
    array[:] = 1
    return place(array)


class Shared(numa_ranks.Segment):
    """The package's segment, as the tests of the kernels want it."""

    def __init__(self, member: Member) -> None:
        segment = member.segment(COLLECTIVES_SLOT)
        self.world_size, self.slot_bytes, self.pointer = member.world_size, COLLECTIVES_SLOT, segment.pointer
        self.address = int(ffi.cast("uintptr_t", segment.pointer))
        self.size = int(lib.vac_segment_size(member.world_size, COLLECTIVES_SLOT))


def mixed_calls(member: Member, sizes: Sequence[int], large: Sequence[int]) -> tuple[str, int]:
    """The kernel tests' random sequence of calls, with delays, which end a process that writes to a peer's slots.

    Returns:
        A digest of all results, each compared with the sum in the order of ranks; and where the segment lies.
    """
    shared = Shared(member)
    rank = numa_ranks.Rank(shared, member.rank)
    # Joining zeroes the rank's flags: nobody may have begun.
    member.exchange(None)
    digest = numa_ranks.mixed_calls(rank, member.world_size, sizes, large, [(3, 1000, "bf16")])
    member.segment(COLLECTIVES_SLOT).check()
    return digest, shared.address


def all_reduce(member: Member, count: int, dtype: str, phases: int) -> np.ndarray:
    values = encode(np.random.default_rng(member.rank).standard_normal(count).astype(np.float32), dtype)
    args = ffi.new(
        "vac_all_reduce_args *", {"communicator": member.kept["communicator"], "num_rows": 1, "row_size": count}
    )
    args.out, args.dtype, args.phases = pointer(values), DTYPES[dtype], phases
    setattr(args, "in", args.out)
    run(kernel("all_reduce"), args, member.plan.threads.num_threads)
    return values


def all_gather(member: Member, nbytes: int) -> np.ndarray:
    own = np.full(nbytes, member.rank + 1, np.uint8)
    out = np.zeros(nbytes * member.world_size, np.uint8)
    args = ffi.new("vac_gather_args *", {"communicator": member.kept["communicator"], "num_rows": 1})
    args.out, args.row_bytes, args.in_row_stride = pointer(out), nbytes, nbytes
    setattr(args, "in", pointer(own))
    args.out_row_stride, args.out_rank_stride = nbytes * member.world_size, nbytes
    run(kernel("all_gather"), args, member.plan.threads.num_threads)
    return out


def load(member: Member) -> list[tuple[int, int]]:
    """Load the model; where its arenas are."""
    model = TinyLlama(member.rank, member.world_size, member.plan.threads.num_threads, member.kept["communicator"])
    member.kept["model"] = model
    arenas = [linear.packed for layer in model.layers for linear in layer] + model.caches + [model.embedding]
    return [(array.ctypes.data, array.nbytes) for array in arenas]


def generate(member: Member, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = member.kept["model"].generate(prompt, count)
    return tokens


def step(member: Member, token: int, position: int) -> int:
    following: int = member.kept["model"].step([token], position)
    return following
