"""From logits to tokens on our kernels."""
