"""Token embeddings: lookup in the table as loaded, or in the packed form that lm_head multiplies by."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_arm_cpu.layers.linear import PackedLinear
from vllm_arm_cpu.native.call import DTYPES, Call, pointer

_call: Call | None = None


def embedding(self: UnquantizedEmbeddingMethod, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
    """Rows of the table: input_ int32 or int64 [...] -> [..., hidden].

    vLLM has masked ids of other vocabulary shards before it calls this.
    """
    packed = getattr(layer, "cpu_linear", None)
    if isinstance(packed, PackedLinear):
        return packed.embedding(input_)
    table = layer.weight
    if table.dtype not in DTYPES or table.stride(1) != 1:
        return torch.nn.functional.embedding(input_, table)
    global _call
    if _call is None:
        _call = Call(("vac_embedding", "vac_embedding_args"))
    vocab, hidden = table.shape
    ids = input_.contiguous()
    out = torch.empty((ids.numel(), hidden), dtype=table.dtype)
    args = _call.args[0]
    args.dtype = DTYPES[table.dtype]
    args.ids, args.ids_are_int64, args.num_tokens = pointer(ids), ids.dtype == torch.int64, ids.numel()
    args.table, args.table_row_stride, args.hidden_size = pointer(table), table.stride(0), hidden
    args.vocab_start, args.vocab_end = 0, vocab
    args.out, args.out_token_stride = pointer(out), hidden
    _call.run()
    return out.view(*ids.shape, hidden)


def register() -> None:
    """vLLM's embedding method has no hook of its own; its ``embedding`` is replaced."""
    UnquantizedEmbeddingMethod.embedding = embedding
