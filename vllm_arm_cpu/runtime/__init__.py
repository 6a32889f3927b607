"""The process around the kernels: CPU, topology, preloaded libraries, threads, memory.

Standard library only, and nothing slow at import: the plugin's ``register()``
runs in every process that imports vLLM, before torch.
"""
