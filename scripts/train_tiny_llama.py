#!/usr/bin/env python3
"""Trains the small Llama checkpoint in examples/tiny-llama on the King James text of Debian's `bible-kjv-text`.

Run it as `python scripts/train_tiny_llama.py`; it needs torch, transformers, tokenizers and safetensors, and the
Debian packages `bible-kjv` and `bible-kjv-text` (or their .deb files, unpacked with --root). It writes the
tokenizer, the BF16 weights, the configuration and the held-out text. The seed is fixed, but sums differ
between CPUs, so another machine gives a checkpoint of the same quality and not the same bits.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 20260

BOS, EOS, PAD, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, USER, ASSISTANT]
BOS_ID, EOS_ID, PAD_ID, USER_ID, ASSISTANT_ID = range(5)

# Every size that a linear layer contracts over is a multiple of 256: int4 groups of 32, 64 and 128 divide it, also
# after a split over two ranks. Two KV heads, so that the split does not have to replicate them.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "use_cache": True,
    "dtype": "bfloat16",
}

# A system message has no token of its own: it opens the first user turn.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- set ns = namespace(system='') %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}"
    "{%- set ns.system = ns.system + message['content'] | trim + '\\n' %}"
    "{%- elif message['role'] == 'user' %}"
    "{{- '<|user|>' + ns.system + message['content'] | trim }}"
    "{%- set ns.system = '' %}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' + message['content'] | trim + eos_token }}"
    "{%- else %}"
    "{{- raise_exception('tiny-llama knows the roles system, user and assistant, not ' + message['role']) }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)

BOOKS = {
    "Ge": "Genesis", "Exo": "Exodus", "Lev": "Leviticus", "Num": "Numbers", "Deu": "Deuteronomy", "Josh": "Joshua",
    "Jdgs": "Judges", "Ruth": "Ruth", "1Sm": "1 Samuel", "2Sm": "2 Samuel", "1Ki": "1 Kings", "2Ki": "2 Kings",
    "1Chr": "1 Chronicles", "2Chr": "2 Chronicles", "Ezra": "Ezra", "Neh": "Nehemiah", "Est": "Esther", "Job": "Job",
    "Psa": "Psalm", "Prv": "Proverbs", "Eccl": "Ecclesiastes", "SSol": "Song of Solomon", "Isa": "Isaiah",
    "Jer": "Jeremiah", "Lam": "Lamentations", "Eze": "Ezekiel", "Dan": "Daniel", "Hos": "Hosea", "Joel": "Joel",
    "Amos": "Amos", "Obad": "Obadiah", "Jonah": "Jonah", "Mic": "Micah", "Nahum": "Nahum", "Hab": "Habakkuk",
    "Zep": "Zephaniah", "Hag": "Haggai", "Zec": "Zechariah", "Mal": "Malachi", "Mat": "Matthew", "Mark": "Mark",
    "Luke": "Luke", "John": "John", "Acts": "Acts", "Rom": "Romans", "1Cor": "1 Corinthians", "2Cor": "2 Corinthians",
    "Gal": "Galatians", "Eph": "Ephesians", "Phi": "Philippians", "Col": "Colossians", "1Th": "1 Thessalonians",
    "2Th": "2 Thessalonians", "1Tim": "1 Timothy", "2Tim": "2 Timothy", "Titus": "Titus", "Phmn": "Philemon",
    "Heb": "Hebrews", "Jas": "James", "1Pet": "1 Peter", "2Pet": "2 Peter", "1Jn": "1 John", "2Jn": "2 John",
    "3Jn": "3 John", "Jude": "Jude", "Rev": "Revelation",
}  # fmt: skip

HELDOUT_BOOKS = {"Genesis", "1 Samuel", "Proverbs", "Isaiah", "Matthew", "Luke", "Acts"}
HELDOUT_SHARE = 0.03

QUESTIONS = (
    "Tell me of {}.",
    "Who was {}?",
    "What is written of {}?",
    "Speak to me of {}.",
    "What do you know of {}?",
)
THEMES = (
    "wisdom", "mercy", "peace", "the sea", "gold", "bread", "wine", "the sword", "the temple", "the sabbath",
    "the wilderness", "faith", "hope", "charity", "light", "darkness", "fire", "rain", "sheep", "oxen", "the king",
    "the priest", "the city", "the poor", "the rich", "sleep", "the heart", "the tongue", "truth", "joy",
)  # fmt: skip


@dataclass(frozen=True)
class Verse:
    book: str
    chapter: int
    text: str


@dataclass(frozen=True)
class Corpus:
    """Chapters as lists of verses; `heldout` is never trained on, `chats` are lists of (question, answer) turns."""

    chapters: list[tuple[str, list[str]]]
    heldout: list[tuple[str, list[str]]]
    chats: list[list[tuple[str, str]]]


def read_verses(root: Path) -> list[Verse]:
    """All 31102 verses, printed by Debian's `bible` program found under `root` (usually /)."""
    program, data = root / "usr/bin/bible", root / "usr/lib/bible.data"
    for path, package in ((program, "bible-kjv"), (data, "bible-kjv-text")):
        if not path.exists():
            sys.exit(
                f"{path} not found. Install the text with `apt-get install bible-kjv bible-kjv-text`, or fetch both "
                f"packages with `apt-get download`, unpack them with `dpkg-deb -x FILE DIR` and pass --root DIR "
                f"(missing: {package})."
            )
    command = [str(program), "-f", "-p", str(data.parent), "gen1:1-rev22:21"]
    output = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    verses = []
    for line in output.splitlines():
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):\d+ (.+)", line.strip())
        if match:
            verses.append(Verse(BOOKS[match[1]], int(match[2]), " ".join(match[3].split())))
    if len(verses) != 31102:
        sys.exit(f"`{' '.join(command)}` printed {len(verses)} verses, expected 31102.")
    return verses


def split_corpus(verses: list[Verse], rng: random.Random) -> Corpus:
    """Takes the last 3 % of the verses of HELDOUT_BOOKS out of the training text."""
    by_book: dict[str, list[Verse]] = defaultdict(list)
    for verse in verses:
        by_book[verse.book].append(verse)
    training, heldout = [], []
    for book, book_verses in by_book.items():
        cut = len(book_verses) - (round(len(book_verses) * HELDOUT_SHARE) if book in HELDOUT_BOOKS else 0)
        training += book_verses[:cut]
        heldout += book_verses[cut:]
    return Corpus(group_chapters(training), group_chapters(heldout), make_chats(training, rng))


def group_chapters(verses: list[Verse]) -> list[tuple[str, list[str]]]:
    chapters: dict[str, list[str]] = defaultdict(list)
    for verse in verses:
        chapters[f"{verse.book} {verse.chapter}"].append(verse.text)
    return list(chapters.items())


def chapter_text(heading: str, verses: list[str]) -> str:
    return heading + "\n" + "\n".join(verses) + "\n"


def make_chats(verses: list[Verse], rng: random.Random) -> list[list[tuple[str, str]]]:
    """Questions for each frequent name and each theme, answered with verses that soon name it; some with two turns."""
    short = [verse.text for verse in verses if 40 <= len(verse.text) <= 180]
    # A capital inside a sentence marks a name; one that is also written small is an ordinary word.
    inside = Counter(word for text in short for word in re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}\b", text))
    small = Counter(word for text in short for word in re.findall(r"\b[a-z]+\b", text))
    names = [name for name, count in inside.most_common() if count >= 6 and small[name.lower()] == 0]
    chats = []
    for topic in [*names, *THEMES]:
        word = re.compile(rf"\b{topic.removeprefix('the ')}\b")
        answers = [text for text in short if word.search(text[:60])]
        questions = [question for question in QUESTIONS if topic in names or question != "Who was {}?"]
        count = min(3, len(answers))
        pairs = zip(rng.sample(questions, count), rng.sample(answers, count), strict=True)
        chats += [[(question.format(topic), answer)] for question, answer in pairs]
    return chats + [rng.choice(chats) + rng.choice(chats) for _ in range(len(chats) // 4)]


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    chats = (text for chat in corpus.chats for turn in chat for text in turn)
    tokenizer.train_from_iterator([chapter_text(*chapter) for chapter in corpus.chapters] + list(chats), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, output: Path) -> None:
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(output / "tokenizer_config.json", settings)


class Batches:
    """Endless shuffled epochs of token windows.

    A chapter is shown whole under its heading, or cut at random verses into passages without one, so that the model
    also knows prompts that begin in the middle of a chapter.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, rng: random.Random) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        self.rng = rng
        self.chapters = [
            (encode(heading + "\n"), [encode(verse + "\n") for verse in verses]) for heading, verses in corpus.chapters
        ]
        self.chats = [
            [
                t
                for question, answer in chat
                for t in (USER_ID, *encode(question), ASSISTANT_ID, *encode(answer), EOS_ID)
            ]
            for chat in corpus.chats
        ]
        self.epoch_tokens = len(self._epoch())
        self._pending: list[int] = []

    def next(self, batch_size: int, length: int) -> Tensor:
        """int64 [batch_size, length + 1]: inputs are [:, :-1], targets [:, 1:]."""
        wanted = batch_size * (length + 1)
        while len(self._pending) < wanted:
            self._pending += self._epoch()
        window, self._pending = self._pending[:wanted], self._pending[wanted:]
        return torch.tensor(window).view(batch_size, length + 1)

    def _epoch(self) -> list[int]:
        documents = [[BOS_ID, *chat] for chat in self.chats]
        for heading, verses in self.chapters:
            documents += self._passages(heading, verses)
        self.rng.shuffle(documents)
        return [token for document in documents for token in document]

    def _passages(self, heading: list[int], verses: list[list[int]]) -> Iterator[list[int]]:
        if self.rng.random() < 0.5:
            yield [BOS_ID, *heading, *(token for verse in verses for token in verse), EOS_ID]
            return
        cuts = sorted(self.rng.sample(range(1, len(verses)), min(3, len(verses) - 1)))
        for start, end in zip([0, *cuts], [*cuts, len(verses)], strict=True):
            yield [BOS_ID, *(token for verse in verses[start:end] for token in verse)]


@torch.no_grad()
def perplexity(model: nn.Module, tokens: list[int], window: int = 512) -> float:
    """exp(mean negative log likelihood) of `tokens`, cut into windows of `window - 1` tokens behind one BOS each."""
    nll = 0.0
    for start in range(0, len(tokens), window - 1):
        ids = torch.tensor([[BOS_ID, *tokens[start : start + window - 1]]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        nll += nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return math.exp(nll / len(tokens))


def train(model: LlamaForCausalLM, batches: Batches, heldout: list[int], args: argparse.Namespace) -> None:
    """Linear warmup, cosine decay; the last quarter of the steps sees windows of the full context length.

    Muon (Jordan et al. 2024) for the matrices of the layers, scaled so that it shares AdamW's learning rate and decay
    (Liu et al. 2025), AdamW for the embedding and the norms: it gets more out of a text this small than AdamW alone.
    """
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    embedding = [model.model.embed_tokens.weight]
    adamw_groups = [{"params": embedding, "weight_decay": args.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adamw_groups, lr=args.lr, betas=(0.9, 0.95)),
    ]
    scaled = torch.autocast("cpu", dtype=torch.bfloat16) if args.autocast else nullcontext()
    start, running = time.monotonic(), 0.0
    for step in range(args.steps):
        warmup = min(1.0, (step + 1) / args.warmup)
        lr = args.lr * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr
        length = 256 if step < 0.75 * args.steps else CONFIG["max_position_embeddings"]
        tokens = batches.next(args.batch_tokens // length, length)
        with scaled:
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        # Where a document ends is chance, so the model is not taught to begin the next one by itself.
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), ignore_index=BOS_ID)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        if (step + 1) % args.report == 0 or step + 1 == args.steps:
            ppl = perplexity(model, heldout)
            epoch = (step + 1) * args.batch_tokens / batches.epoch_tokens
            print(
                f"step {step + 1}/{args.steps} epoch {epoch:.1f} loss {running:.3f} held-out perplexity {ppl:.2f} "
                f"lr {lr:.1e} {time.monotonic() - start:.0f} s",
                flush=True,
            )


def write_checkpoint(model: LlamaForCausalLM, output: Path) -> None:
    """The tied output embedding is not stored twice; weights are rounded to BF16 to nearest even."""
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    write_json(output / "config.json", CONFIG)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    write_json(output / "generation_config.json", generation)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "examples/tiny-llama")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the Debian packages are unpacked")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--warmup", type=int, default=100, help="steps of linear warmup")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", type=int, default=100, help="steps between two lines of output")
    parser.add_argument(
        "--autocast", action="store_true", help="multiply in BF16 (for a CPU that has BF16 matrix instructions)"
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    corpus = split_corpus(read_verses(args.root), rng)
    tokenizer = train_tokenizer(corpus)
    heldout_text = "\n".join(chapter_text(*chapter) for chapter in corpus.heldout)
    heldout = tokenizer.encode(heldout_text, add_special_tokens=False).ids
    batches = Batches(corpus, tokenizer, rng)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "dtype": "float32"})).train()
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters} parameters, {batches.epoch_tokens} tokens in an epoch, {len(corpus.chats)} chats, "
        f"held out: {len(heldout_text)} characters, {len(heldout)} tokens",
        flush=True,
    )
    train(model, batches, heldout, args)

    args.output.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, args.output)
    write_checkpoint(model, args.output)
    (args.output / "heldout.txt").write_text(heldout_text)
    rounded = LlamaForCausalLM.from_pretrained(args.output, dtype=torch.bfloat16).float().eval()
    print(f"held-out perplexity of the BF16 weights: {perplexity(rounded, heldout):.3f}")


if __name__ == "__main__":
    main()
