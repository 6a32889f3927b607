"""Paged attention on our kernels: the backend that vLLM calls, and the cache it reads."""

DEFAULT_BLOCK_SIZE = 16
"""Tokens per KV cache block unless ``--block-size`` is given: the smaller the
block, the more of a shared prefix is found in the cache, and the kernel reads
blocks of 16 as fast as larger ones."""
