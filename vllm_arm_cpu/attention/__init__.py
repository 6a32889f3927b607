"""Paged attention on our kernels: the backend that vLLM calls, and the cache it reads."""
