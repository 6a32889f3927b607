"""A real language model, Gemma 3 of 270 million parameters: what is read to it, and how perplexed FP32 is by that.

``scripts/test.sh slow`` makes the checkpoint in build/gemma3-270m. An FP32 forward pass through it takes minutes under
emulation, so the reference's figures stand here. To compute them anew, on any machine with torch, transformers and
compressed-tensors:

    python3 -m tests.integration.gemma270m [SCHEME...]
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FOLDER = Path(os.environ.get("VAC_TEST_GEMMA", "build/gemma3-270m"))
TEXT = (
    "The bridge over the river was finished in the spring of that year. It had taken four years and two engineers to "
    "build it, and when the first train crossed, people stood on both banks and waved their hats. Before the bridge "
    "there had been a ferry, which ran from sunrise to sunset unless the water was too high. The ferryman knew "
    "everybody in the valley. He knew who was going to the market, who was going to see a doctor, and who was leaving "
    "for good. After the first train had passed he tied up his boat, went home and planted potatoes.\n\n"
    "Water boils at a lower temperature on a mountain than at the sea, because the pressure of the air is lower there. "
    "That is why eggs have to be cooked longer in the mountains, and why a pressure cooker is a useful thing to have "
    "in a kitchen at three thousand metres. The opposite is true as well: in a closed pot the pressure rises, the "
    "water becomes hotter than one hundred degrees, and beans that would take two hours are soft in twenty minutes."
)
QUESTIONS = ("Question: What is the capital of France?\nAnswer:", "The opposite of hot is", "One, two, three, four,")
"""What it is asked; it is no model that chats."""

ROUNDING = {"w8a8": "symmetric", "w4a8-group32": "symmetric", "w4a8-packed-group128": "asymmetric"}
"""Scheme of scripts/quantize_checkpoint.py -> how the engine rounds activations in the test, per token."""

REFERENCE = {
    "bf16": (19.119, 0.01),
    "w8a8": (20.16, 0.03),
    "w4a8-group32": (27.13, 0.11),
    "w4a8-packed-group128": (37.05, 0.06),
}
"""Perplexity of the text in FP32: of the checkpoint; of quantized ones with rounded activations and lm_head in INT8.

Behind it what the engine's may differ by, relatively. Where activations are rounded, the figure depends on which way
values in the middle between two integers go: changing inputs by as little as rounding to BF16 does moves it by 0.6, 2.7
and 1.4 % (standard deviation of eight draws, whose mean this is). Four times that is allowed, but no less than 3 %.

lm_head is in INT8 since products in BF16 are what takes minutes under emulation, and two thirds of this model are its
lm_head. It makes 1 % in W8A8.
"""

ANSWERS = {
    "bf16": ((" Paris",), (" cold",), (" five",)),
    "w8a8": ((" Paris",), (" cold",), (" five",)),
    "w4a8-group32": ((" Paris",), (" cold",), (" five", " four")),
    "w4a8-packed-group128": ((" Paris",), (" a", " cold"), (" and",)),
}
"""The tokens with which FP32, rounding alike, answers each question: four bits cost so small a model some of them."""

DRAWS = 8


@functools.cache
def tokenizer() -> Tokenizer:
    """Read once: its 600 000 pairs take a minute under emulation."""
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def token_ids() -> list[int]:
    """The text's tokens behind one BOS."""
    ids: list[int] = tokenizer().encode(TEXT).ids
    return ids


def reference(scheme: str) -> tuple[list[float], list[tuple[str, ...]]]:
    """The perplexities whose mean stands in ``REFERENCE``, and what stands in ``ANSWERS``."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.integration.quantized import dequantized, script

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    generator = torch.Generator()

    def round_inputs(_module: Any, inputs: Any) -> Any:
        (x,) = inputs
        # The standard deviation of rounding to BF16.
        noise = torch.randn(x.shape, generator=generator) * (2.0**-9 / 3**0.5)
        return _round_inputs(ROUNDING[scheme], None, (x * (1 + noise),))

    if scheme != "bf16":
        with tempfile.TemporaryDirectory() as directory:
            weights = dequantized(script().quantize_checkpoint(FOLDER, Path(directory), scheme))
        for layer, weight in weights.items():
            module = model.get_submodule(layer)
            module.weight.data.copy_(torch.from_numpy(weight))
            module.register_forward_pre_hook(round_inputs)
        # Embeddings stay as they are.
        table = model.lm_head.weight.data
        model.lm_head.weight = torch.nn.Parameter(_round_inputs("symmetric", None, (table,)))
        model.lm_head.register_forward_pre_hook(functools.partial(_round_inputs, "symmetric"))
    ids, perplexities = token_ids(), []
    answers: list[set[str]] = [set() for _ in QUESTIONS]
    for draw in range(1 if scheme == "bf16" else DRAWS):
        generator.manual_seed(draw)
        with torch.no_grad():
            likely = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        perplexities.append(math.exp(-float(likely.mean())))
        for question, given in zip(QUESTIONS, answers, strict=True):
            generator.manual_seed(draw)
            with torch.no_grad():
                logits = model(torch.tensor([tokenizer().encode(question).ids])).logits[0, -1]
            given.add(tokenizer().decode([int(logits.argmax())]))
    return perplexities, [tuple(sorted(given)) for given in answers]


def _round_inputs(rounding: str, _module: Any, inputs: Any) -> Any:
    """To 8 bits, one scale for each token, and a zero point where they are asymmetric."""
    (x,) = inputs
    if rounding == "symmetric":
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = -128 - (low / scale).round()
    return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale


if __name__ == "__main__":
    for name in sys.argv[1:] or REFERENCE:
        draws, answers = reference(name)
        mean, spread = statistics.mean(draws), statistics.stdev(draws) if len(draws) > 1 else 0.0
        print(f"{name}: {mean:.3f} in FP32, with a standard deviation of {spread:.3f}; {len(token_ids())} tokens")
        print(f"{name}: answers {answers}")
