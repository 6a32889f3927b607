"""A local model hub for vLLM's tests: what they load by name from a hub, made here.

    tests/upstream/hub.py FOLDER

FOLDER gets the layout of the hub client's cache, which is all that is looked at
when HF_HUB_OFFLINE is set. whitelist.toml names the models: each is a copy of a
folder of the clone, with what a test needs beyond it:
  config: other values in config.json. A larger vocabulary gives the embedding rows
    of zeros: tokens without a text, never the likeliest;
  tokens: special ones, behind the tokenizer's vocabulary;
  files: JSON files, in the place of those of their name;
  same_as: another's name; nothing else is said then.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
REVISION = "0" * 40


def make(folder: Path, models: dict[str, dict[str, Any]]) -> None:
    """Write each model into the cache, again if it is there."""
    for name, model in models.items():
        model = models[model.get("same_as", name)]
        cache = folder / "hub" / f"models--{name.replace('/', '--')}"
        shutil.rmtree(cache, ignore_errors=True)
        snapshot = cache / "snapshots" / REVISION
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text(REVISION)
        shutil.copytree(PROJECT / model["folder"], snapshot)
        config = json.loads((snapshot / "config.json").read_text())
        changes = model.get("config", {})
        if changes.get("vocab_size", config["vocab_size"]) != config["vocab_size"]:
            pad(snapshot / "model.safetensors", "model.embed_tokens.weight", changes["vocab_size"])
        (snapshot / "config.json").write_text(json.dumps(config | changes, indent=2))
        add_tokens(snapshot / "tokenizer.json", model.get("tokens", ()))
        for file, content in model.get("files", {}).items():
            (snapshot / file).write_text(json.dumps(content, indent=2))


def add_tokens(path: Path, tokens: Sequence[str]) -> None:
    """Give a tokenizer special tokens, the first free numbers theirs."""
    tokenizer = json.loads(path.read_text())
    taken = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    for number, token in enumerate(tokens, max(taken) + 1):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": number, "content": token} | flags)
    path.write_text(json.dumps(tokenizer))


def pad(path: Path, name: str, rows: int) -> None:
    """Give a tensor of a safetensors file so many rows; the file's format: https://github.com/huggingface/safetensors.

    What is added are zeros, which all number formats write as zero bytes.
    """
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    entry = header[name]
    begin, end = entry["data_offsets"]
    width = (end - begin) // entry["shape"][0]
    assert math.prod(entry["shape"]) > 0 and rows > entry["shape"][0], f"{name} is {entry['shape']}, not below {rows}"
    added = width * (rows - entry["shape"][0])
    entry["shape"][0] = rows
    for key, other in header.items():
        if key != "__metadata__":
            first, last = other["data_offsets"]
            other["data_offsets"] = [first + added * (first >= end), last + added * (last >= end)]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[:end] + bytes(added) + data[end:])


if __name__ == "__main__":
    make(Path(sys.argv[1]), tomllib.loads((HERE / "whitelist.toml").read_text())["models"])
