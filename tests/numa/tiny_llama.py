"""A Llama on the package's kernels alone, split over ranks as vLLM splits it: the embedded checkpoint, one sequence.

Without torch and vLLM, whose imports take minutes in full-system emulation. Every rank reads its own part of the
file into arenas of its own; row-parallel outputs, the embedding and the logits pass through the shared segment.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.kernels.support import DTYPES, ffi, from_bf16, kernel, lib, pointer, run
from vllm_arm_cpu.runtime import memory

BF16, F32 = DTYPES["bf16"], DTYPES["f32"]
CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny-llama"
BLOCK = 16
MAX_TOKENS = 512


class Checkpoint:
    """Tensors of a safetensors file as views of its pages."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self._data = np.memmap(folder / "model.safetensors", np.uint8, "r")
        (length,) = struct.unpack("<Q", self._data[:8].tobytes())
        self._header = json.loads(self._data[8 : 8 + length].tobytes())
        self._begin = 8 + length

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._header[name]
        assert entry["dtype"] == "BF16"
        begin, end = (self._begin + offset for offset in entry["data_offsets"])
        # The header may end at any byte.
        return np.frombuffer(self._data[begin:end].tobytes(), np.uint16).reshape(entry["shape"])


def arena(nbytes: int) -> np.ndarray:
    """What memory.allocate() makes a tensor of."""
    mapping, start = memory.map_aligned(nbytes)
    return np.frombuffer(mapping, np.uint8)[start : start + nbytes]


def part(array: np.ndarray, rank: int, world_size: int, axis: int) -> np.ndarray:
    """A rank's equal share of the rows (axis 0, column-parallel) or columns (axis 1, row-parallel)."""
    size = array.shape[axis] // world_size
    assert size * world_size == array.shape[axis]
    return array.take(range(rank * size, (rank + 1) * size), axis)


class Linear:
    """A packed weight."""

    def __init__(self, weight: np.ndarray, team: int) -> None:
        weight = np.ascontiguousarray(weight)
        self.n, self.k = weight.shape
        self.packed = arena(lib.vac_gemm_rhs_packed_size(BF16, self.n, self.k))
        args = ffi.new("vac_gemm_rhs_pack_args *", {"dtype": BF16, "n": self.n, "k": self.k, "rhs_stride": self.k})
        args.rhs, args.packed = pointer(weight), pointer(self.packed)
        run(kernel("gemm_rhs_pack"), args, team)
        self._team = team

    def __call__(self, x: np.ndarray) -> np.ndarray:
        m = x.shape[0]
        out = np.empty((m, self.n), np.uint16)
        scratch = np.empty(lib.vac_gemm_workspace_size(BF16, m, self.n, self.k, self._team), np.uint8)
        args = ffi.new("vac_gemm_args *", {"dtype": BF16, "out_dtype": BF16, "m": m, "n": self.n, "k": self.k})
        args.lhs, args.rhs, args.out, args.workspace = map(pointer, (x, self.packed, out, scratch))
        args.lhs_stride, args.out_stride = x.strides[0] // 2, self.n
        run(kernel("gemm"), args, self._team)
        return out


class TinyLlama:
    """One rank's part of the model, and its KV cache.

    Args:
        communicator: ``vac_communicator *`` of the group.
    """

    def __init__(self, rank: int, world_size: int, team: int, communicator: Any) -> None:
        self.rank, self.world_size, self.team, self.communicator = rank, world_size, team, communicator
        file = Checkpoint(CHECKPOINT)
        config = file.config
        self.hidden, self.head_size = config["hidden_size"], config["head_dim"]
        self.num_heads = config["num_attention_heads"] // world_size
        self.num_kv_heads = config["num_key_value_heads"] // world_size
        self.intermediate = config["intermediate_size"] // world_size
        self.vocabulary, self.eps = config["vocab_size"] // world_size, config["rms_norm_eps"]

        def rows(*names: str) -> np.ndarray:
            return np.concatenate([part(file[name], rank, world_size, 0) for name in names])

        self.embedding = arena(self.vocabulary * self.hidden * 2).view(np.uint16).reshape(-1, self.hidden)
        self.embedding[:] = rows("model.embed_tokens.weight")
        self.head = Linear(self.embedding, team)
        self.layers, self.norms = [], []
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            columns = [
                part(file[name], rank, world_size, 1)
                for name in (attention + "o_proj.weight", mlp + "down_proj.weight")
            ]
            qkv = rows(*(f"{attention}{name}_proj.weight" for name in "qkv"))
            gate_up = rows(mlp + "gate_proj.weight", mlp + "up_proj.weight")
            self.layers.append([Linear(weight, team) for weight in (qkv, columns[0], gate_up, columns[1])])
            self.norms += [file[prefix + "input_layernorm.weight"], file[prefix + "post_attention_layernorm.weight"]]
        self.norms.append(file["model.norm.weight"])

        self.page = lib.vac_kv_cache_page_size(lib.VAC_KV_SAME, BF16, self.head_size, self.head_size, BLOCK) // 2
        blocks = MAX_TOKENS // BLOCK
        self.caches = [arena(blocks * self.num_kv_heads * self.page * 2) for _ in self.layers]
        # Neither in order nor in a row, as after some time of serving.
        self.block_table = np.arange(blocks, dtype=np.int32)[::-1].copy()
        frequencies = config["rope_theta"] ** (-np.arange(0, self.head_size, 2) / self.head_size)
        angles = np.arange(MAX_TOKENS)[:, None] * frequencies
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        self.workspace = np.zeros(lib.vac_attention_workspace_size(self.head_size, self.head_size, team) + 64, np.uint8)

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` tokens that follow the prompt, each the likeliest."""
        tokens = [self.step(prompt, 0)]
        while len(tokens) < count:
            tokens.append(self.step(tokens[-1:], len(prompt) + len(tokens) - 1))
        return tokens

    def step(self, ids: Sequence[int], position: int) -> int:
        """Read tokens that begin at a position of the sequence; the next token."""
        m = len(ids)
        positions = np.arange(position, position + m, dtype=np.int64)
        block, offset = np.divmod(positions, BLOCK)
        slots = self.block_table[block].astype(np.int64) * BLOCK + offset
        residual = self._embed(np.array(ids, np.int64))
        x = self._norm(residual, self.norms[0])
        for layer, (qkv_proj, o_proj, gate_up_proj, down_proj) in enumerate(self.layers):
            attention = self._attend(qkv_proj(x), positions, slots, self.caches[layer])
            x = self._add_norm(self._sum(o_proj(attention)), residual, self.norms[2 * layer + 1])
            x = self._add_norm(
                self._sum(down_proj(self._activate(gate_up_proj(x)))), residual, self.norms[2 * layer + 2]
            )
        return int(from_bf16(self._gather(self.head(x[-1:]))).argmax())

    def _run(self, name: str, struct: str, **fields: Any) -> None:
        args = ffi.new(f"{struct} *")
        for field, value in fields.items():
            setattr(args, field.removesuffix("_"), pointer(value) if isinstance(value, np.ndarray) else value)
        run(kernel(name), args, self.team)

    def _embed(self, ids: np.ndarray) -> np.ndarray:
        out = np.empty((ids.size, self.hidden), np.uint16)
        begin = self.rank * self.vocabulary
        self._run(
            "embedding",
            "vac_embedding_args",
            out=out,
            ids=ids,
            table=self.embedding,
            num_tokens=ids.size,
            hidden_size=self.hidden,
            vocab_start=begin,
            vocab_end=begin + self.vocabulary,
            table_row_stride=self.hidden,
            out_token_stride=self.hidden,
            ids_are_int64=1,
            dtype=BF16,
        )
        return self._sum(out)

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        out, (m, n) = np.empty_like(x), x.shape
        self._run(
            "rms_norm",
            "vac_rms_norm_args",
            out=out,
            x=x,
            weight=weight,
            num_tokens=m,
            num_heads=1,
            hidden_size=n,
            x_token_stride=n,
            x_head_stride=n,
            out_token_stride=n,
            out_head_stride=n,
            eps=self.eps,
            dtype=BF16,
            weight_dtype=BF16,
        )
        return out

    def _add_norm(self, x: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> np.ndarray:
        out, (m, n) = np.empty_like(x), x.shape
        self._run(
            "fused_add_rms_norm",
            "vac_fused_add_rms_norm_args",
            out=out,
            x=x,
            residual=residual,
            weight=weight,
            num_tokens=m,
            hidden_size=n,
            x_token_stride=n,
            residual_token_stride=n,
            out_token_stride=n,
            eps=self.eps,
            dtype=BF16,
            weight_dtype=BF16,
        )
        return out

    def _activate(self, gate_up: np.ndarray) -> np.ndarray:
        m, n = gate_up.shape[0], self.intermediate
        out = np.empty((m, n), np.uint16)
        self._run(
            "silu_and_mul",
            "vac_silu_and_mul_args",
            out=out,
            x=gate_up,
            num_tokens=m,
            d=n,
            x_token_stride=2 * n,
            out_token_stride=n,
            activation=lib.VAC_ACTIVATION_SILU,
            dtype=BF16,
        )
        return out

    def _attend(self, qkv: np.ndarray, positions: np.ndarray, slots: np.ndarray, cache: np.ndarray) -> np.ndarray:
        m, width = qkv.shape
        size, heads, kv_heads = self.head_size, self.num_heads, self.num_kv_heads
        key, value = qkv[:, heads * size :], qkv[:, (heads + kv_heads) * size :]
        queries = {"query": qkv, "query_token_stride": width, "query_head_stride": size, "num_heads": heads}
        keys = {"key": key, "key_token_stride": width, "key_head_stride": size}
        self._run(
            "rotary",
            "vac_rotary_args",
            positions=positions,
            cos_sin_cache=self.cos_sin,
            num_tokens=m,
            num_kv_heads=kv_heads,
            rot_dim=size,
            max_position=MAX_TOKENS,
            is_neox_style=1,
            dtype=BF16,
            cache_dtype=F32,
            **queries,
            **keys,
        )
        paged = {
            "kv_cache": cache,
            "cache_block_stride": kv_heads * self.page,
            "cache_head_stride": self.page,
            "num_kv_heads": kv_heads,
            "head_size": size,
            "v_head_size": size,
            "block_size": BLOCK,
            "dtype": BF16,
            "cache_format": lib.VAC_KV_SAME,
        }
        self._run(
            "kv_cache_write",
            "vac_kv_cache_write_args",
            value=value,
            slot_mapping=slots,
            num_tokens=m,
            value_token_stride=width,
            value_head_stride=size,
            **keys,
            **paged,
        )
        starts = np.array([0, m], np.int32)
        lengths = np.array([positions[-1] + 1], np.int32)
        plan = np.zeros(lib.vac_attention_plan_size(1, self.team) // 8 + 1, np.int64)
        wanted = ffi.new("vac_attention_plan_args *", {"num_reqs": 1, "num_heads": heads, "num_kv_heads": kv_heads})
        wanted.query_start_loc = ffi.cast("int32_t *", starts.ctypes.data)
        wanted.seq_lens = ffi.cast("int32_t *", lengths.ctypes.data)
        wanted.causal, wanted.num_threads = 1, self.team
        assert lib.vac_attention_plan(wanted, ffi.cast("int32_t *", plan.ctypes.data), plan.nbytes) == 0
        out = np.empty((m, heads * size), np.uint16)
        aligned = self.workspace[-self.workspace.ctypes.data % 64 :]
        self._run(
            "attention",
            "vac_attention_args",
            output=out,
            block_table=self.block_table,
            query_start_loc=starts,
            seq_lens=lengths,
            plan=plan,
            workspace=aligned,
            output_token_stride=heads * size,
            output_head_stride=size,
            block_table_stride=self.block_table.size,
            causal=1,
            scale=size**-0.5,
            **queries,
            **paged,
        )
        return out

    def _sum(self, partial: np.ndarray) -> np.ndarray:
        self._run(
            "all_reduce",
            "vac_all_reduce_args",
            communicator=self.communicator,
            out=partial,
            in_=partial,
            num_rows=1,
            row_size=partial.size,
            dtype=BF16,
        )
        return partial

    def _gather(self, logits: np.ndarray) -> np.ndarray:
        out = np.empty(logits.size * self.world_size, np.uint16)
        self._run(
            "all_gather",
            "vac_gather_args",
            communicator=self.communicator,
            out=out,
            in_=logits,
            num_rows=1,
            row_bytes=logits.nbytes,
            in_row_stride=logits.nbytes,
            out_row_stride=out.nbytes,
            out_rank_stride=logits.nbytes,
        )
        return out
