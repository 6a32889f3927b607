"""EAGLE heads for the embedded checkpoint that know the golden texts by heart; made in seconds, without training.

All weights are random but those of ``down_proj``: the inner activations of the MLP are random features of what the
head is given, from which least squares finds what the head is to give (an "extreme learning machine": Huang et al.,
2006). A head like that drafts well as long as everything before that layer is right, attention and its cache included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM

from tests.integration.engine import MODEL, golden

INTERMEDIATE = 384
DRAFT_VOCABULARY = 1024
TAPS = (1, 2, 4)
"""Behind how many of its target's layers an EAGLE-3 head looks; the last is behind all of them."""


@dataclass(frozen=True)
class Text:
    """A golden text and what the target makes of it, in FP32; everything but the ids is [tokens, hidden].

    Attributes:
        ids: int64 [tokens].
        embedded: the tokens' embeddings.
        taps: the residual stream at each of ``TAPS``.
        normed: what lm_head is given.
    """

    ids: torch.Tensor
    embedded: torch.Tensor
    taps: list[torch.Tensor]
    normed: torch.Tensor


def make(method: str, directory: Path, *names: str) -> Path:
    """Write a head for ``eagle`` or ``eagle3`` into a new directory, which is returned; names: of its golden texts."""
    target = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    texts = [_read(target, entry["prompt_token_ids"] + entry["token_ids"]) for entry in golden(*names)]
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "intermediate_size": INTERMEDIATE, "tie_word_embeddings": False}
    with torch.no_grad():
        head = (_Eagle if method == "eagle" else _Eagle3)(config, target, texts)
    directory.mkdir(parents=True)
    save_file(head.tensors(), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(head.config, indent=2))
    return directory


@torch.no_grad()
def _read(target: LlamaForCausalLM, tokens: list[int]) -> Text:
    states: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: states.append(output.reshape(len(tokens), -1)))
        for layer in target.model.layers
    ]
    ids = torch.tensor(tokens)
    normed = target.model(ids[None]).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return Text(ids, target.model.embed_tokens(ids), [states[tap - 1] for tap in TAPS], normed)


class _Head:
    """What both kinds have in common; at index t a head is given the token t + 1 and a state t, and gives state t + 1.

    Attributes:
        weights: by name, [out, in], BF16 numbers in FP32.
    """

    def __init__(self, config: dict[str, Any], attention_input: int) -> None:
        self.config = config
        self._generator = torch.Generator().manual_seed(0)
        hidden, size = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        self.weights = {
            "self_attn.q_proj": self.random(heads, attention_input),
            "self_attn.k_proj": self.random(kv_heads, attention_input),
            "self_attn.v_proj": self.random(kv_heads, attention_input),
            # What attention finds is to count as much as what the token itself is.
            "self_attn.o_proj": self.random(hidden, heads, 3.0),
            "mlp.gate_proj": self.random(INTERMEDIATE, hidden),
            "mlp.up_proj": self.random(INTERMEDIATE, hidden),
        }

    def random(self, n: int, k: int, scale: float = 1.0) -> torch.Tensor:
        return _rounded(torch.randn(n, k, generator=self._generator) * scale * k**-0.5)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def attention(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Of every row over the rows before it in ``memory`` (its own by default) and over itself."""
        size, heads = self.config["head_dim"], self.config["num_attention_heads"]
        query, key, value = (self._heads(x, part) for part in "qkv")
        if memory is None:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            # One key and value more for each row: the row's own, at its place.
            tokens = len(x)
            keys = torch.cat([self._heads(memory, "k"), key], dim=1)
            values = torch.cat([self._heads(memory, "v"), value], dim=1)
            earlier = torch.ones(tokens, tokens, dtype=torch.bool).tril(-1)
            mask = torch.cat([earlier, torch.eye(tokens, dtype=torch.bool)], dim=1)
            mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return mixed.transpose(0, 1).reshape(len(x), heads * size) @ self.weights["self_attn.o_proj"].T

    def fit(self, streams: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        """Find the ``down_proj`` that takes the residual stream behind attention to the states that are wanted."""
        stream = torch.cat(streams)
        normed = self.norm(stream)
        features = silu(normed @ self.weights["mlp.gate_proj"].T) * (normed @ self.weights["mlp.up_proj"].T)
        # A little regularization: the features are rounded to BF16 in the engine.
        gram = features @ features.T
        gram.diagonal().mul_(1.001)
        solution = torch.linalg.solve(gram, torch.cat(wanted) - stream)
        self.weights["mlp.down_proj"] = _rounded(solution.T @ features)

    def checkpoint(self, layer: str, **others: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors of the checkpoint, by name; layer: that of the only layer; others: matrices and norms outside it."""
        named = {f"{layer}.{name}.weight": tensor for name, tensor in self.weights.items()}
        ones = torch.ones(self.config["hidden_size"])
        named[f"{layer}.post_attention_layernorm.weight"] = ones
        named |= {f"{name}.weight": tensor for name, tensor in others.items()}
        return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in named.items()}

    def _heads(self, x: torch.Tensor, part: str) -> torch.Tensor:
        """Queries, keys or values, rotated: [heads, tokens, size]."""
        size = self.config["head_dim"]
        heads = (x @ self.weights[f"self_attn.{part}_proj"].T).view(len(x), -1, size).transpose(0, 1)
        if part == "v":
            return heads
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(len(x))[:, None] * frequencies
        one, two = heads.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


class _Eagle(_Head):
    """The token's embedding and the target's last, normed state become one row; its own output takes that's place."""

    def __init__(self, config: dict[str, Any], target: LlamaForCausalLM, texts: list[Text]) -> None:
        hidden = config["hidden_size"]
        super().__init__(config, hidden)
        given = [text.embedded for text in texts], [text.normed for text in texts]
        scales = [0.7 / torch.cat(part).square().mean().sqrt() for part in given]
        self.fc = torch.cat([self.random(hidden, hidden, float(scale)) for scale in scales], dim=1)
        rows = [torch.cat([text.embedded[1:], text.normed[:-1]], dim=1) @ self.fc.T for text in texts]
        self.fit([row + self.attention(row) for row in rows], [text.normed[1:] for text in texts])

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.checkpoint("layers.0", fc=self.fc)


class _Eagle3(_Head):
    """Attention sees the token beside a mixture of the target's inner states; its vocabulary is a part of the target's.

    The head's own output, before its norm, takes the mixture's place for the second draft and later ones.
    """

    def __init__(self, config: dict[str, Any], target: LlamaForCausalLM, texts: list[Text]) -> None:
        hidden = config["hidden_size"]
        config = config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": DRAFT_VOCABULARY,
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
        }
        super().__init__(config, 2 * hidden)
        self._target = target
        inner = [self.random(hidden, hidden, 0.5) for _ in TAPS[:-1]]
        self.fc = torch.cat([*inner, torch.eye(hidden)], dim=1)
        streams, wanted = [], []
        for text in texts:
            mixture, state = torch.cat(text.taps, dim=1)[:-1] @ self.fc.T, text.taps[-1]
            given = self._attended(text, mixture)
            streams.append(mixture + self.attention(given))
            streams.append(state[:-1] + self.attention(self._attended(text, state[:-1]), given))
            wanted += [state[1:]] * 2
        self.fit(streams, wanted)
        known = sorted(set(torch.cat([text.ids for text in texts]).tolist()))
        others = [token for token in range(config["vocab_size"]) if token not in known]
        self.tokens = torch.tensor(sorted(known + others[: DRAFT_VOCABULARY - len(known)]))

    def tensors(self) -> dict[str, torch.Tensor]:
        ones = torch.ones(self.config["hidden_size"])
        norms = {"midlayer.input_layernorm": ones, "midlayer.hidden_norm": ones, "norm": self._target.model.norm.weight}
        head = self._target.lm_head.weight[self.tokens]
        tensors = self.checkpoint("midlayer", fc=self.fc, lm_head=head, **norms)
        return tensors | {"d2t": self.tokens - torch.arange(len(self.tokens))}

    def _attended(self, text: Text, state: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norm(text.embedded[1:]), self.norm(state)], dim=1)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).float()
