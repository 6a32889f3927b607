"""Dense linear layers: each weight goes to the fastest kernel at load, in the form that kernel reads.

vLLM calls :func:`prepare_linear` for every unquantized linear, lm_head and
embedding layer once its weights are loaded (see ``compat/linear_dispatch.py``)
and then ``layer.cpu_linear(x, weight, bias)``. A layer at a time is packed and
its original released: loading takes the model's memory and that of one layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_arm_cpu import envs
from vllm_arm_cpu.layers import linear_candidates as candidates
from vllm_arm_cpu.layers import linear_tuner as tuner
from vllm_arm_cpu.layers.linear_candidates import LinearCall, OneDnnLinear, PackedLinear
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES
from vllm_arm_cpu.platform import upstream_ops_available
from vllm_arm_cpu.runtime import cpu, pages

__all__ = [
    "PackOnFirstUse",
    "PackedLinear",
    "environment",
    "prepare_linear",
    "release",
    "released",
    "share_weight",
    "summary",
]

logger = init_logger("vllm.arm_cpu.linear")

upstream_dispatch: Callable[[torch.nn.Module, bool], None] | None = None
"""vLLM's own dispatch, for weights that are not matrices; set by the patch that replaces it."""


def prepare_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Give a layer its ``cpu_linear`` after its weight was loaded, or loaded again.

    ``remove_weight`` is vLLM's word for a plain linear layer; embeddings and
    lm_head come with False.

    Raises:
        LinearKernelError: VAC_LINEAR forces a kernel that does not take the weight.
    """
    weight = layer.weight
    if "vac_packed" in weight.__dict__:
        _join(layer)
    elif weight.is_meta or weight.ndim != 2:
        # A missing pipeline stage, or a convolution or expert weight: who uses one knows how.
        assert upstream_dispatch is not None
        if weight.is_meta or upstream_ops_available():
            upstream_dispatch(layer, remove_weight)
    elif _multiplies_itself(layer):
        # By the weight as it is. Its own apply may call vLLM's.
        layer.cpu_linear = torch.nn.functional.linear
    elif "cpu_linear" in layer.__dict__:
        _load_again(layer)
    elif remove_weight:
        _assign([layer], looked_up=False)
    else:
        sharing = share_weight(layer)
        layer.cpu_linear = PackOnFirstUse(layer)
        if any(map(_is_head, sharing)):
            _assign_shared(layer)


def _multiplies_itself(layer: torch.nn.Module) -> bool:
    """Whether the layer's method is another package's, derived from vLLM's for unquantized layers."""
    method = getattr(layer, "quant_method", None)
    return isinstance(method, UnquantizedLinearMethod) and type(method).apply is not UnquantizedLinearMethod.apply


def share_weight(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """Enter an embedding or lm_head in the list of those that have its parameter; the list."""
    # They find each other through it.
    sharing: list[torch.nn.Module] = layer.weight.__dict__.setdefault("vac_sharing_layers", [])
    sharing.append(layer)
    layer.vac_sharing_layers = sharing
    return sharing


class PackOnFirstUse:
    """For an embedding that may or may not be multiplied by: packs when it is.

    Some models use their embedding layer as lm_head without a layer of its own.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = self.pack()(x, self._layer.weight, bias)
        return result

    def pack(self) -> LinearCall:
        """Choose the kernel of the embedding's layers now."""
        _assign_shared(self._layer)
        linear: LinearCall = self._layer.cpu_linear
        return linear


def summary(model: torch.nn.Module) -> str | None:
    """The table of a loaded model's kernels, or None if it has no dense linear layers."""
    groups: dict[tuple[tuner.Shape, str], list[torch.nn.Module]] = {}
    for module in model.modules():
        chosen = module.__dict__.get("vac_choice")
        if chosen is not None:
            groups.setdefault((chosen[0], chosen[1].winner), []).append(module)
    rows = []
    for (shape, _), layers in groups.items():
        # Tied layers have one weight.
        sizes = {
            id(layer.cpu_linear) if hasattr(layer.cpu_linear, "nbytes") else id(layer.weight): _nbytes(layer)
            for layer in layers
        }
        rows.append(tuner.Row(shape, len(layers), layers[0].vac_choice[1], sum(sizes.values())))
    return tuner.table(rows) if rows else None


def released(model: torch.nn.Module) -> list[str]:
    """Names of the layers whose own parameters are empty because a kernel holds the weight."""
    return [
        name
        for name, module in model.named_modules()
        if "vac_choice" in module.__dict__ and any(p.numel() == 0 for p in module.parameters(recurse=False))
    ]


def release(parameter: torch.nn.Parameter, name: str, otherwise: str = "") -> None:
    """Free a weight that was packed; the parameter stays, empty, where vLLM looks for it.

    Args:
        name: of its layer, for the error that loading into it gives.
        otherwise: what else may be done then.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"the weight of {name} is packed and cannot be loaded into: use reload_weights(weights_iterator=...) or "
            f"reload_weights(weights_path=...) of the worker, which pack again{otherwise}"
        )

    storage = parameter.data.untyped_storage()
    parameter.data = torch.empty(0, dtype=parameter.dtype)
    parameter.weight_loader = refuse
    # Allocators keep what is freed for a while, in which several layers would come together.
    if torch._C._storage_Use_Count(storage._cdata) == 1:
        pages.release(storage.data_ptr(), storage.nbytes())


def _nbytes(layer: torch.nn.Module) -> int:
    held = sum(p.numel() * p.element_size() for p in layer.parameters(recurse=False) if p.ndim == 2)
    return int(getattr(layer.cpu_linear, "nbytes", 0) + held)


def _assign(layers: list[torch.nn.Module], looked_up: bool, is_head: bool = False) -> None:
    """Choose the kernel for layers that share one weight, and hand the weight to it."""
    layer = layers[0]
    parameter, weight, name = layer.weight, layer.weight.data, _name(layers)
    n, k = weight.shape
    if is_head and envs.VAC_LM_HEAD == "int8" and weight.dtype in DTYPES:
        from vllm_arm_cpu.quantization import w8a8

        head = w8a8.Int8Head(weight, name)
        for member in layers:
            member.cpu_linear, member.vac_choice = head, (tuner.Shape("int8", n, k), w8a8.ONLY)
        if not looked_up:
            del weight
            _release(parameter, name)
            parameter.__dict__["vac_packed"] = layers
        return
    shape = tuner.Shape(str(weight.dtype).removeprefix("torch."), n, k)
    mode = envs.VAC_LINEAR
    # Who forces oneDNN gets it, at the price of a table for the lookup beside it.
    refused = candidates.refusals(weight.dtype, n, k, looked_up and mode != "onednn")
    choice = _tuner(mode, envs.VAC_CACHE_DIR, library.load().vac_max_threads()).choose(
        name, shape, refused, lambda candidate: candidates.runner(candidate, weight)
    )
    linear = candidates.make(choice.winner, weight, name)
    for member in layers:
        member.cpu_linear, member.vac_choice = linear, (shape, choice)
    if isinstance(linear, PackedLinear) or (isinstance(linear, OneDnnLinear) and not looked_up):
        del weight
        _release(parameter, name)
        parameter.__dict__["vac_packed"] = layers


def _join(layer: torch.nn.Module) -> None:
    """A layer whose weight was packed already, for another layer that shares it."""
    sharing = layer.weight.__dict__["vac_packed"]
    if layer in sharing:
        return
    layer.cpu_linear, layer.vac_choice = sharing[0].cpu_linear, sharing[0].vac_choice
    if not isinstance(layer.cpu_linear, PackedLinear) and not _is_head(layer):
        raise tuner.LinearKernelError(
            f"{_name([layer])} shares the weight of {_name(sharing)}, whose kernel cannot look up rows: "
            "set VAC_LINEAR=vac and VAC_LM_HEAD=bf16"
        )
    sharing.append(layer)
    layer.vac_sharing_layers = sharing


def _is_head(layer: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, ParallelLMHead)


def _assign_shared(layer: torch.nn.Module) -> None:
    """One weight for all embedding layers and heads that share a parameter: lookup and lm_head read the same copy."""
    sharing = layer.vac_sharing_layers
    _assign(sharing, looked_up=not all(map(_is_head, sharing)), is_head=True)


def _load_again(layer: torch.nn.Module) -> None:
    """New values for a layer that has its kernel: vLLM's layerwise reload has filled a new parameter.

    The parameter that the layer had before, released or not, is put back by
    the reload afterwards, and the new one's contents are copied into it.
    """
    linear = layer.cpu_linear
    if not hasattr(linear, "nbytes"):
        return  # It reads layer.weight when it is called.
    sharing = layer.__dict__.get("vac_sharing_layers", [layer])
    looked_up = not all(map(_is_head, sharing)) if len(sharing) > 1 else False
    weight, released = layer.weight, isinstance(linear, PackedLinear) or not looked_up
    if looked_up and _is_head(layer):
        # Tied, but the new checkpoint has a weight for this layer, too: they are tied no more.
        sharing.remove(layer)
        layer.vac_sharing_layers = [layer]
        layer.cpu_linear = linear.another(weight.data, _name([layer]))
        released = True
    else:
        linear.load(weight.data)
    if released:
        _release(weight, _name([layer]))


def _release(parameter: torch.nn.Parameter, name: str) -> None:
    release(parameter, name, ", or VAC_LINEAR=torch")


def _name(layers: list[torch.nn.Module]) -> str:
    """The layers' names, for errors and compiled graphs."""
    return " and ".join(getattr(layer, "prefix", "") or type(layer).__name__ for layer in layers)


@functools.lru_cache
def _tuner(mode: str, cache_directory: str, num_threads: int) -> tuner.Tuner:
    return tuner.Tuner(candidates.ORDER, mode, tuner.ChoiceCache(Path(cache_directory), environment(num_threads)))


def environment(num_threads: int) -> tuple[str, ...]:
    """What else than the shape the time of a kernel depends on."""
    return (
        cpu.detect().name,
        cpu.TIERS[library.load().vac_tier()],
        f"{num_threads} threads",
        *(f"{package} {_version(package)}" for package in ("vllm-arm-cpu", "vllm")),
        f"torch {torch.__version__}",
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
