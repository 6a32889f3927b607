"""Benchmark cases of the elementwise and sampling kernels: one call each, single thread, BF16 unless named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_arm_cpu.native import library

ffi = library.ffi
lib = library.load()

Case = tuple[Callable[[], None], int]
_BF16 = 2


def _pointer(array: np.ndarray, ctype: str = "void *") -> object:
    return ffi.cast(ctype, array.ctypes.data)


def _bf16(*shape: int) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _call(kernels: list[str], args: object, keep: list[object], bytes_read: int) -> Case:
    """A call that runs the kernels in order as thread 0 of 1; ``keep`` holds what ``args`` points to."""
    functions = [getattr(lib, f"vac_{name}") for name in kernels]

    def call(_keep: list[object] = keep) -> None:
        for function in functions:
            function(args, 0, 1)

    return call, bytes_read


def rms_norm_1x4096() -> Case:
    x, weight, out = _bf16(4096), _bf16(4096), _bf16(4096)
    args = ffi.new("vac_rms_norm_args *")
    args.out, args.x, args.weight = _pointer(out), _pointer(x), _pointer(weight)
    args.num_tokens, args.num_heads, args.hidden_size = 1, 1, 4096
    args.eps, args.dtype, args.weight_dtype = 1e-6, _BF16, _BF16
    return _call(["rms_norm"], args, [x, weight, out], x.nbytes + weight.nbytes)


def fused_add_rms_norm_1x4096() -> Case:
    x, residual, weight = _bf16(4096), _bf16(4096), _bf16(4096)
    args = ffi.new("vac_fused_add_rms_norm_args *")
    args.out = args.x = _pointer(x)
    args.residual, args.weight = _pointer(residual), _pointer(weight)
    args.num_tokens, args.hidden_size = 1, 4096
    args.eps, args.dtype, args.weight_dtype = 1e-6, _BF16, _BF16
    return _call(["fused_add_rms_norm"], args, [x, residual, weight], 3 * x.nbytes)


def qk_norm_40x128() -> Case:
    x, weight = _bf16(40, 128), _bf16(128)
    args = ffi.new("vac_rms_norm_args *")
    args.out = args.x = _pointer(x)
    args.weight = _pointer(weight)
    args.num_tokens, args.num_heads, args.hidden_size = 1, 40, 128
    args.x_head_stride = args.out_head_stride = 128
    args.eps, args.dtype, args.weight_dtype = 1e-6, _BF16, _BF16
    return _call(["rms_norm"], args, [x, weight], x.nbytes + weight.nbytes)


def rotary_1x40x128() -> Case:
    query, key, cache, positions = _bf16(32, 128), _bf16(8, 128), _bf16(64, 128), np.array([7], np.int64)
    args = ffi.new("vac_rotary_args *")
    args.query, args.key, args.cos_sin_cache = _pointer(query), _pointer(key), _pointer(cache)
    args.positions = _pointer(positions, "int64_t *")
    args.num_tokens, args.num_heads, args.num_kv_heads = 1, 32, 8
    args.rot_dim, args.max_position = 128, 64
    args.query_head_stride = args.key_head_stride = 128
    args.is_neox_style, args.dtype, args.cache_dtype = 1, _BF16, _BF16
    return _call(["rotary"], args, [query, key, cache, positions], query.nbytes + key.nbytes + 256)


def silu_and_mul_1x14336() -> Case:
    x, out = _bf16(2 * 14336), _bf16(14336)
    args = ffi.new("vac_silu_and_mul_args *")
    args.out, args.x = _pointer(out), _pointer(x)
    args.num_tokens, args.d, args.activation, args.dtype = 1, 14336, lib.VAC_ACTIVATION_SILU, _BF16
    return _call(["silu_and_mul"], args, [x, out], x.nbytes)


def _logits(vocab_size: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(vocab_size) * 2.5).astype(np.float32)


def argmax_1x128256() -> Case:
    logits, out = _logits(128256), np.zeros(1, np.int64)
    workspace = np.zeros(lib.vac_argmax_workspace_size(1, logits.size), np.uint8)
    args = ffi.new("vac_argmax_args *")
    args.out, args.logits, args.workspace = _pointer(out, "int64_t *"), _pointer(logits), _pointer(workspace)
    args.num_reqs, args.vocab_size = 1, logits.size
    return _call(["argmax_partial", "argmax_merge"], args, [logits, out, workspace], logits.nbytes)


def _mask(k: int, p: float) -> Case:
    """The call masks a fresh copy each time it is prepared; a second call finds most logits at -inf."""
    logits = _logits(151936)
    ks, ps = np.array([k], np.int32), np.array([p], np.float32)
    workspace = np.zeros(lib.vac_top_k_top_p_mask_workspace_size(logits.size, 1), np.uint8)
    args = ffi.new("vac_top_k_top_p_mask_args *")
    args.logits, args.k, args.p = _pointer(logits, "float *"), _pointer(ks, "int32_t *"), _pointer(ps, "float *")
    args.workspace = _pointer(workspace)
    args.num_reqs, args.vocab_size, args.num_workspaces = 1, logits.size, 1
    return _call(["top_k_top_p_mask"], args, [logits, ks, ps, workspace], logits.nbytes)


def topk20_topp95_1x151936() -> Case:
    return _mask(20, 0.95)


def topp95_1x151936() -> Case:
    return _mask(0, 0.95)


def gumbel_argmax_1x151936() -> Case:
    logits, out = _logits(151936), np.zeros(1, np.int64)
    seed, offset = np.array([1], np.uint64), np.array([2], np.uint64)
    workspace = np.zeros(lib.vac_gumbel_argmax_workspace_size(1, logits.size), np.uint8)
    args = ffi.new("vac_gumbel_argmax_args *")
    args.out, args.logits = _pointer(out, "int64_t *"), _pointer(logits, "float *")
    args.seed, args.offset = _pointer(seed, "uint64_t *"), _pointer(offset, "uint64_t *")
    args.workspace, args.num_reqs, args.vocab_size = _pointer(workspace), 1, logits.size
    keep = [logits, out, seed, offset, workspace]
    return _call(["gumbel_argmax_partial", "gumbel_argmax_merge"], args, keep, logits.nbytes)


def softmax_stats_3x128256() -> Case:
    """What three drafts of one request are accepted by."""
    logits, out = np.tile(_logits(128256), (3, 1)), np.zeros((3, 2), np.float32)
    workspace = np.zeros(lib.vac_softmax_stats_workspace_size(*logits.shape), np.uint8)
    args = ffi.new("vac_softmax_stats_args *")
    args.out, args.logits = _pointer(out, "vac_softmax_stat *"), _pointer(logits, "float *")
    args.workspace, args.num_rows, args.vocab_size = _pointer(workspace), *logits.shape
    args.row_stride = args.vocab_size
    return _call(["softmax_stats_partial", "softmax_stats_merge"], args, [logits, out, workspace], logits.nbytes)


def _recovered(with_draft_probs: bool) -> Case:
    """A token in the place of one rejected draft."""
    logits, out = _logits(128256), np.zeros(1, np.int32)
    weights = np.exp(logits.astype(np.float64))
    stats = np.array([logits.max(), weights.sum() / weights.max()], np.float32)
    draft = np.exp(logits + np.random.default_rng(1).standard_normal(logits.size) * 0.5)
    draft_probs = (draft / draft.sum()).astype(np.float32)
    rejected, ends, ids = np.array([0], np.int32), np.array([1], np.int32), np.array([7], np.int32)
    seed = np.array([1], np.uint64)
    workspace = np.zeros(lib.vac_recovered_tokens_workspace_size(1, logits.size), np.uint8)
    args = ffi.new("vac_recovered_tokens_args *")
    args.out, args.rejected = _pointer(out, "int32_t *"), _pointer(rejected, "int32_t *")
    args.cu_num_draft_tokens, args.draft_token_ids = _pointer(ends, "int32_t *"), _pointer(ids, "int32_t *")
    args.logits, args.stats = _pointer(logits, "float *"), _pointer(stats, "vac_softmax_stat *")
    if with_draft_probs:
        args.draft_probs = _pointer(draft_probs, "float *")
    args.seed, args.workspace = _pointer(seed, "uint64_t *"), _pointer(workspace)
    args.num_reqs, args.vocab_size, args.out_row_stride = 1, logits.size, 1
    keep = [logits, out, stats, draft_probs, rejected, ends, ids, seed, workspace]
    num_bytes = logits.nbytes * (2 if with_draft_probs else 1)
    return _call(["recovered_tokens_partial", "recovered_tokens_merge"], args, keep, num_bytes)


def recovered_1x128256() -> Case:
    return _recovered(False)


def recovered_draft_1x128256() -> Case:
    return _recovered(True)


CASES: dict[str, Callable[[], Case]] = {
    "rms_norm_1x4096": rms_norm_1x4096,
    "fused_add_rms_norm_1x4096": fused_add_rms_norm_1x4096,
    "qk_norm_40x128": qk_norm_40x128,
    "rotary_1x40x128": rotary_1x40x128,
    "silu_and_mul_1x14336": silu_and_mul_1x14336,
    "argmax_1x128256": argmax_1x128256,
    "topk20_topp95_1x151936": topk20_topp95_1x151936,
    "topp95_1x151936": topp95_1x151936,
    "gumbel_argmax_1x151936": gumbel_argmax_1x151936,
    "softmax_stats_3x128256": softmax_stats_3x128256,
    "recovered_1x128256": recovered_1x128256,
    "recovered_draft_1x128256": recovered_draft_1x128256,
}
