"""Give a checkpoint's pages back once a tensor was read from them.

vLLM reads safetensors files through a mapping that lives until the file's last
tensor was read, so that resident memory comes to twice a one-file model while
it is loaded. Wraps ``safetensors_weights_iterator`` as the default loader
knows it: what was read leaves the process and stays in the page cache. There
is no hook between two tensors. Can go once vLLM or safetensors lets go of what
it has read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader import default_loader

from vllm_arm_cpu.runtime import pages


@contextlib.contextmanager
def released_once_read() -> Iterator[None]:
    """Within the block, weights that the default loader yields are released when the next one is asked for."""
    original = default_loader.safetensors_weights_iterator
    default_loader.safetensors_weights_iterator = functools.partial(_iterate, original)
    try:
        yield
    finally:
        default_loader.safetensors_weights_iterator = original


def _iterate(
    original: Callable[..., Iterator[tuple[str, torch.Tensor]]], *args: Any, **kwargs: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    mapped = False
    storage = 0
    for name, tensor in original(*args, **kwargs):
        if tensor.untyped_storage().data_ptr() != storage:
            storage = tensor.untyped_storage().data_ptr()
            mapped = _is_mapped_file(tensor.data_ptr())
        version = tensor._version
        yield name, tensor
        # A tensor that was written to is no longer what the file holds; one that is kept is read from the file again.
        if mapped and tensor._version == version and tensor.is_contiguous():
            pages.release(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _is_mapped_file(address: int) -> bool:
    """Whether an address lies in a mapped file: in other memory the call would destroy the values."""
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                addresses, _, _, _, inode = line.split(None, 5)[:5]
                low, _, high = addresses.partition("-")
                if int(low, 16) <= address < int(high, 16):
                    return inode != "0"
    except (OSError, ValueError):
        pass
    return False
