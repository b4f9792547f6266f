"""kvq: quantized KV-cache pages, and attention over them."""
