#!/usr/bin/env python3
"""Writes tests/data/golden_tokens.json: what examples/tiny-llama gives in Hugging Face transformers, greedy.

The weights are the BF16 ones, the sums are FP32. A BF16 engine has to give the very same tokens, so only continuations
are kept whose best token leads the second best by more than BF16 noise at every step (the noise of that lead is 0.03,
and tokens were seen to swap up to a lead of 0.07, over the held-out text): many candidates are tried, a
continuation is cut where it gets unsure, and the richest of each kind stays. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch
from train_tiny_llama import perplexity
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).parents[1]
NEW_TOKENS = 48
SHORTEST = 16
WINDOW = 512
FIRST_WINDOWS = 1

OPENINGS = (
    "In the beginning", "And God said,", "The LORD is my", "Blessed are the", "Now the sons of",
    "And it came to pass", "Thus saith the LORD", "Hear, O Israel", "And Moses spake unto", "And Jesus answered",
    "Verily, verily, I say", "And the children of Israel", "The word of the LORD came", "And David said unto",
    "The wise man", "Praise ye the LORD", "And when he had", "Behold, I will", "And the priest shall", "And he made",
    "Then said Jesus", "O give thanks unto", "And the LORD spake unto Moses", "And in those days",
    "And the king said", "Paul, an apostle", "And I saw", "For the kingdom of", "And Pharaoh", "And the angel of",
    "And Abraham", "Then Samuel", "And Joshua the son of", "The proverbs of", "Woe unto", "Son of man,",
    "And Elijah", "And Solomon", "Let us", "He that hath",
)  # fmt: skip
CHAT_NAMES = (
    "Noah", "Abraham", "Moses", "David", "Solomon", "Samuel", "Joshua", "Peter", "Paul", "Jacob", "Joseph", "Aaron",
    "Pharaoh", "Egypt", "Jerusalem", "Babylon", "Saul", "Elijah", "Elisha", "Jonathan", "Esau", "Isaac", "Pilate",
)  # fmt: skip
CHAT_QUESTIONS = ("Tell me of {}.", "Who was {}?", "What is written of {}?", "Speak to me of {}.")


@dataclass
class Golden:
    name: str
    text: str
    prompt_token_ids: list[int]
    messages: list[dict[str, str]] | None = None
    token_ids: list[int] = field(default_factory=list)
    top2_margin: list[float] = field(default_factory=list)
    continuation: str = ""

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Long enough comes first, then what repeats itself least (a loop proves little), then the surest."""
        long_enough = len(self.token_ids) >= SHORTEST
        return long_enough, len(set(self.token_ids)), min(self.top2_margin, default=0.0)


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens and, for each, by how much its logit leads the second best; ends behind EOS."""
    output = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best_two = [logits[0].float().topk(2).values.tolist() for logits in output.logits]
    return output.sequences[0, len(prompt) :].tolist(), [round(best - second, 4) for best, second in best_two]


def complete(golden: Golden, fp32: PreTrainedModel, bf16: PreTrainedModel, margin: float) -> Golden:
    """Fills in the continuation, up to the first step that is unsure or where the BF16 model goes another way."""
    for new_tokens in (SHORTEST, NEW_TOKENS):  # most candidates are given up after the first, short round
        tokens, margins = greedy(fp32, golden.prompt_token_ids, new_tokens)
        sure = next((i for i, gap in enumerate(margins) if gap < margin), len(tokens))
        if sure < new_tokens:
            break
    if sure >= SHORTEST:
        rounded, _ = greedy(bf16, golden.prompt_token_ids, sure)
        sure = next((i for i, pair in enumerate(zip(tokens, rounded, strict=False)) if pair[0] != pair[1]), sure)
    golden.token_ids, golden.top2_margin = tokens[:sure], margins[:sure]
    return golden


class Candidates:
    """Prompts to try. Passages are of the held-out text, so none of them was learnt by heart."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, heldout: str) -> None:
        self.tokenizer = tokenizer
        self.heldout = heldout
        self.words = heldout.replace("\n\n", "\n").split(" ")

    def short(self) -> Iterator[Golden]:
        """The openings, and the first words of every held-out verse."""
        verses = [line.split(" ") for line in self.heldout.splitlines() if line]
        for text in dict.fromkeys((*OPENINGS, *(" ".join(words[:n]) for words in verses for n in (4, 6)))):
            yield self._plain("short", text)

    def passages(self, name: str, tokens: int, stride: int) -> Iterator[Golden]:
        """From every `stride`-th word on, as many words as make at least `tokens` tokens."""
        for prefix in self._prefixes(tokens, stride):
            yield self._plain(name, prefix)

    def openings_behind_passage(self, name: str, tokens: int, stride: int) -> Iterator[list[Golden]]:
        """For each passage the prompts that go on with one of the openings."""
        for prefix in self._prefixes(tokens, stride):
            yield [self._plain(name, f"{prefix}\n{opening}") for opening in OPENINGS]

    def chat(self) -> Iterator[Golden]:
        for question in CHAT_QUESTIONS:
            for name in CHAT_NAMES:
                messages = [{"role": "user", "content": question.format(name)}]
                text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                yield Golden("chat", text, ids, messages)

    def _plain(self, name: str, text: str) -> Golden:
        return Golden(name, text, self.tokenizer(text)["input_ids"])

    def _prefixes(self, tokens: int, stride: int) -> Iterator[str]:
        for start in range(0, len(self.words) - tokens, stride):
            for end in range(start + tokens // 2, len(self.words)):
                text = " ".join(self.words[start:end])
                if len(self.tokenizer(text)["input_ids"]) >= tokens:
                    yield text
                    break


def choose(
    args: argparse.Namespace, fp32: PreTrainedModel, bf16: PreTrainedModel, candidates: Candidates
) -> list[Golden]:
    def best(goldens: Iterable[Golden], count: int) -> list[Golden]:
        ranked = sorted((complete(g, fp32, bf16, args.margin) for g in goldens), key=lambda g: g.rank, reverse=True)
        chosen: list[Golden] = []
        for golden in ranked:
            # Different prompts often fall into the same phrase; one of them is enough.
            if all(golden.token_ids[:8] != other.token_ids[:8] for other in chosen):
                chosen.append(golden)
        return chosen[:count]

    short = list(candidates.short())
    chosen = best(short, 3)
    longest = max((golden for golden in short if golden not in chosen), key=lambda g: (len(g.token_ids), *g.rank))
    chosen.append(replace(longest, name="longest"))
    chosen += best(candidates.passages("medium", 60, 31), 1)
    chosen += best(chain.from_iterable(candidates.openings_behind_passage("long", 300, 1301)), 1)
    pairs = [best(group, 2) for group in candidates.openings_behind_passage("shared-prefix", 180, 1001)]
    chosen += max(pairs, key=lambda pair: min(golden.rank for golden in pair))
    chosen += best(candidates.chat(), 1)
    for kind in ("short", "shared-prefix"):
        for number, golden in enumerate((g for g in chosen if g.name == kind), 1):
            golden.name = f"{kind}-{number}"
    for golden in chosen:
        golden.continuation = candidates.tokenizer.decode(golden.token_ids)
    return chosen


def to_json(goldens: list[Golden], measured: dict[str, float]) -> str:
    """Like json.dumps(indent=1), but with a list of numbers on one line."""
    prompts = []
    for golden in goldens:
        entries = {key: value for key, value in vars(golden).items() if value is not None}
        lines = [f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        prompts.append("  {\n" + ",\n".join(lines) + "\n  }")
    return '{\n "prompts": [\n' + ",\n".join(prompts) + '\n ],\n "perplexity": ' + json.dumps(measured) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples/tiny-llama")
    parser.add_argument("--output", type=Path, default=ROOT / "tests/data/golden_tokens.json")
    parser.add_argument("--margin", type=float, default=0.2, help="smallest lead of the best logit that is kept")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bf16 = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    fp32 = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    heldout = (args.model / "heldout.txt").read_text()
    tokens = tokenizer(heldout, add_special_tokens=False)["input_ids"]

    goldens = choose(args, fp32, bf16, Candidates(tokenizer, heldout))
    value, rounded = perplexity(fp32, tokens, WINDOW), perplexity(bf16, tokens, WINDOW)
    # A test under emulation has time for the beginning only.
    beginning = tokens[: FIRST_WINDOWS * (WINDOW - 1)]
    measured = {
        "heldout": round(value, 4),
        "tokens": len(tokens),
        "window": WINDOW,
        "heldout_bf16": round(rounded, 4),
        "first_windows": FIRST_WINDOWS,
        "first": round(perplexity(fp32, beginning, WINDOW), 4),
    }
    for golden in goldens:
        print(
            f"{golden.name}: {len(golden.prompt_token_ids)} + {len(golden.token_ids)} tokens, "
            f"smallest margin {min(golden.top2_margin):.2f}\n  ...{golden.text[-60:]!r} -> {golden.continuation!r}"
        )
        if not golden.rank[0]:
            raise SystemExit(f"{golden.name}: no candidate is sure for {SHORTEST} tokens; try a smaller --margin.")
    print(measured)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(to_json(goldens, measured))


if __name__ == "__main__":
    main()
