"""The one table of tolerances. Errors are relative Frobenius norms unless they say otherwise."""

from __future__ import annotations

import torch

# Paged decode against float64 attention over the dequantized cache; fp16 and bf16 outputs add their rounding.
DECODE = {torch.float32: 1e-3, torch.float16: 1.5e-3, torch.bfloat16: 4e-3}
LSE = 5e-3  # absolute, natural log-sum-exp
LSE_LARGE_OFFSET = 3e-2  # absolute, scores of several hundred (|mu| = 200)
# Dequantizing the same bytes: order of float32 sums (float32 products of tf32 parts on a GPU).
GATHER = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# Quantizing the same values: part of the bytes that may differ, where float32 sums round to another side of a tie.
WRITE_BYTES = 5e-3
# float32 attention of the reference against an independent float64 one.
NAIVE = 1e-5
