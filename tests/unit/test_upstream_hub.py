"""The model hub that vLLM's own tests load from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import tomllib

UPSTREAM = Path(__file__).parents[1] / "upstream"


@pytest.fixture(scope="module")
def hub() -> ModuleType:
    # Its folder is a path of vLLM's tests, not a package of ours.
    spec = importlib.util.spec_from_file_location("hub", UPSTREAM / "hub.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(path: Path) -> dict[str, tuple[list[int], bytes]]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % 8 == 0, "data is to be aligned"
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    found, ends = {}, []
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = (entry["shape"], data[begin:end])
            ends.append((begin, end))
    # The format allows no holes.
    ends.sort()
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == len(data)
    return found


@pytest.fixture(scope="module")
def models(hub: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, listed = tmp_path_factory.mktemp("hub"), tomllib.loads((UPSTREAM / "whitelist.toml").read_text())["models"]
    hub.make(folder, listed)
    found = {}
    for name in listed:
        cache = folder / "hub" / f"models--{name.replace('/', '--')}"
        found[name] = cache / "snapshots" / (cache / "refs" / "main").read_text()
    return found


def test_every_model_is_whole(models: dict[str, Path]) -> None:
    assert len(models) > 5
    for folder in models.values():
        files = {file.name for file in folder.iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files


def test_larger_vocabulary_has_rows_of_zeros(models: dict[str, Path]) -> None:
    folder = models["hmellor/tiny-random-LlamaForCausalLM"]
    original = tensors(Path(__file__).parents[2] / "examples" / "tiny-llama" / "model.safetensors")
    padded, name = tensors(folder / "model.safetensors"), "model.embed_tokens.weight"
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == padded[name][0][0] == 32000
    (rows, width), values = original.pop(name)
    assert padded.pop(name) == ([32000, width], values + bytes(2 * width * (32000 - rows)))
    assert padded == original


def test_added_token_is_behind_the_others(models: dict[str, Path]) -> None:
    folder = models["llava-hf/llava-1.5-7b-hf"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    numbers = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert numbers["<image>"] == json.loads((folder / "config.json").read_text())["image_token_index"]
    assert numbers["<image>"] not in tokenizer["model"]["vocab"].values()
    assert (models["Qwen/Qwen2.5-VL-3B-Instruct"] / "config.json").read_bytes() == (folder / "config.json").read_bytes()
