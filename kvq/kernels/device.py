"""What kernels need on the device besides the cache: the transform as tables, and how the kernels are run."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from kvq.page import TILE
from kvq.transform import KeyTransform

USE_ASM = not triton.knobs.runtime.interpret  # the interpreter has no inline assembly
FUSED = {"enable_fp_fusion": True}  # launch option: multiply-adds, whatever a version of Triton does by itself


def next_pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels can be put in place before the one before them has ended (Hopper and later)."""
    return USE_ASM and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@dataclass(frozen=True)
class DeviceTransform:
    """A KeyTransform as device tables, for pages of ``page_size`` tokens and positions 0..max_position.

    The angle of pair j at position p = page_size * f + n is looked up in two tables and composed in float32:
    ``far`` [f, (cos, sin), head_dim / 2] and ``near`` [n, (cos, sin), head_dim / 2], both computed in float64.
    ``inner`` is ``near`` for the pairs of each head, over a tile of pages, in two fp16 halves whose sum has 22 bits.
    ``pairs``: pairs a head whose offset decode adds back, padded to a power of two from 16; 0 for no offset.
    """

    source: KeyTransform
    pairs: int
    has_scale: bool
    max_position: int
    dim_scale: torch.Tensor  # float32 [kv_heads, head_dim]
    pair_index: torch.Tensor  # int32 [kv_heads, pairs]
    pair_dim: torch.Tensor  # int32 [head_dim / 2, 2]
    pair_mu: torch.Tensor  # float32 [kv_heads, 2, pairs]
    inner: torch.Tensor  # fp16 [kv_heads, (high, low), tokens of a tile, (cos, sin), pairs]
    near: torch.Tensor
    far: torch.Tensor
    dim_mu: torch.Tensor  # float32 [2, kv_heads, head_dim]: mu, and the partner's mu with the sign of its sine
    dim_pair: torch.Tensor  # int32 [head_dim]: the pair of a dim

    @staticmethod
    def build(
        transform: KeyTransform, page_size: int, max_position: int, device: torch.device | str
    ) -> DeviceTransform:
        heads, half = transform.kv_heads, transform.head_dim // 2
        pair_mu, pair_dims = transform.pair_mu, transform.pair_dims
        count = transform.num_pairs
        pairs = max(16, next_pow2(count)) if count else 0
        used = (pair_mu != 0).any(-1)
        index = used.to(torch.int32).argsort(dim=1, descending=True, stable=True)
        index = torch.cat([index, torch.zeros(heads, max(0, pairs - half), dtype=torch.int64)], 1)[:, :pairs]
        chosen = pair_mu.gather(1, index[..., None].expand(-1, -1, 2))
        chosen[:, half:] = 0.0  # padding repeats pair 0

        def table(positions: torch.Tensor) -> torch.Tensor:
            angle = positions.double()[:, None] * transform.pair_freq
            return torch.stack([angle.cos(), angle.sin()], 1).float()

        dim_mu = torch.empty(2, heads, transform.head_dim)
        dim_mu[0][:, pair_dims[:, 0]], dim_mu[0][:, pair_dims[:, 1]] = pair_mu[..., 0], pair_mu[..., 1]
        dim_mu[1][:, pair_dims[:, 0]], dim_mu[1][:, pair_dims[:, 1]] = -pair_mu[..., 1], pair_mu[..., 0]
        dim_pair = torch.empty(transform.head_dim, dtype=torch.int32)
        dim_pair[pair_dims.flatten()] = torch.arange(half, dtype=torch.int32).repeat_interleave(2)
        near = table(torch.arange(max(page_size, TILE)))
        inner = near[:, :, index].permute(2, 0, 1, 3)
        high = inner.half()
        tables = (
            transform.dim_scale,
            index.to(torch.int32),
            pair_dims.to(torch.int32),
            chosen.transpose(1, 2).contiguous(),
            torch.stack([high, (inner - high.float()).half()], 1),
            near[:page_size],
            table(torch.arange(max_position // page_size + 1) * page_size),
            dim_mu,
            dim_pair,
        )
        return DeviceTransform(
            transform,
            pairs,
            transform.pair_scale is not None,
            max_position,
            *(t.contiguous().to(device) for t in tables),
        )

    def decode_tensors(self) -> tuple[torch.Tensor, ...]:
        return self.dim_scale, self.pair_index, self.pair_dim, self.pair_mu, self.inner, self.near, self.far
