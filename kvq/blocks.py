"""quantize_blocks: a tensor of keys or values as quantized blocks, and the file format that keeps them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvq import ops, reference
from kvq.kernels.device import DeviceTransform
from kvq.page import PAGE_SIZES, PageLayout
from kvq.scheme import FORMAT_VERSION, QuantScheme, TensorScheme, check_count, check_head_dim
from kvq.transform import KeyTransform

Axis = Literal["token", "channel"]


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """Blocks of ``block_size`` tokens; the last may be partial.

    codes: uint8 [blocks, kv_heads, block_size, head_dim * bits / 8] (reference.pack).
    scales, zeros: fp16 [blocks, kv_heads, block_size] (axis "token") or [blocks, kv_heads, head_dim] (axis "channel":
    one scale a channel over a block, as KIVI does for keys); zeros is None when symmetric.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    scheme: TensorScheme
    axis: Axis
    tokens: int
    dtype: torch.dtype
    blocked: bool  # whether the input had a block dim
    transform: KeyTransform | None = None
    positions: torch.Tensor | None = None
    version: int = FORMAT_VERSION

    @property
    def block_size(self) -> int:
        return self.codes.shape[2]

    @property
    def head_dim(self) -> int:
        return self.codes.shape[3] * 8 // self.scheme.bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return sum(t.nbytes for t in (self.codes, self.scales, self.zeros) if t is not None)

    @property
    def bits_per_element(self) -> float:
        """Stored bits over elements, scales included; a partial last block counts its unused rows."""
        return 8.0 * self.nbytes / (self.tokens * self.codes.shape[1] * self.head_dim)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, shaped like the input, in the original space (transform undone), in ``dtype`` or the input's."""
        codes = reference.unpack(self.codes, self.scheme.bits)
        at = -1 if self.axis == "token" else -2
        zeros = None if self.zeros is None else self.zeros.unsqueeze(at)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        stored = reference.dequantize_rows(codes, self.scales.unsqueeze(at), zeros, self.scheme, work)
        rows = stored.transpose(1, 2).flatten(0, 1)[: self.tokens]
        x = reference.decode(rows, self.scheme, self.transform, self.positions).to(dtype or self.dtype)
        return x.unflatten(0, (-1, self.block_size)) if self.blocked else x

    def to(self, device: torch.device | str) -> QuantizedBlocks:
        """The same blocks on ``device``."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            positions=None if self.positions is None else self.positions.to(device),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, with scheme, version and transform."""
        tensors = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "positions": self.positions}
        stored = {k: v.contiguous().cpu() for k, v in tensors.items() if v is not None}
        if self.transform is not None:
            stored |= self.transform.tensors("transform.")
        meta = {
            "version": self.version,
            "bits": self.scheme.bits,
            "symmetric": self.scheme.symmetric,
            "rotate": self.scheme.rotate,
            "clip": self.scheme.clip,
            "unshrunk": self.scheme.unshrunk,
            "axis": self.axis,
            "tokens": self.tokens,
            "dtype": str(self.dtype).removeprefix("torch."),
            "blocked": self.blocked,
            "transform": None if self.transform is None else self.transform.metadata(),
        }
        save_file(stored, path, {"kvq_blocks": json.dumps(meta)})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> QuantizedBlocks:
        """Read what ``save`` wrote. Raises ValueError for another kind of file or another format version."""
        with safe_open(path, framework="pt") as f:
            header = (f.metadata() or {}).get("kvq_blocks")
            if header is None:
                raise ValueError(f"{os.fspath(path)} does not hold kvq blocks")
            meta = json.loads(header)
            if meta["version"] != FORMAT_VERSION:
                raise ValueError(f"{os.fspath(path)} has version {meta['version']}; this kvq reads {FORMAT_VERSION}")
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        transform = meta["transform"]
        if transform is not None:
            transform = KeyTransform.from_tensors(tensors, transform, "transform.")
        return QuantizedBlocks(
            tensors["codes"],
            tensors["scales"],
            tensors.get("zeros"),
            TensorScheme(meta["bits"], meta["symmetric"], meta["rotate"], meta["clip"], meta["unshrunk"]),
            meta["axis"],
            meta["tokens"],
            getattr(torch, meta["dtype"]),
            meta["blocked"],
            transform,
            tensors.get("positions"),
        )


def quantize_blocks(
    x: torch.Tensor,
    bits: int = 4,
    *,
    block_size: int = 64,
    axis: Axis = "token",
    symmetric: bool | None = None,
    rotate: bool | None = None,
    transform: KeyTransform | None = None,
    positions: torch.Tensor | None = None,
    on_nonfinite: ops.OnNonfinite = "raise",
) -> QuantizedBlocks:
    """Quantize keys or values to 4 or 8 bits, scales a token and head, or a channel and block.

    Args:
        x: [tokens, kv_heads, head_dim], cut into blocks of ``block_size``, or [blocks, block_size, kv_heads, head_dim];
            float16, bfloat16 or float32, any strides, any device. Gradients stop here.
        axis: "token" (append-safe; the page format) or "channel" (a scale a channel over each block).
        symmetric: no zero point. Default: 4 bits asymmetric, 8 bits symmetric.
        rotate: Hadamard along head_dim first. Default: at 4 bits along axis "token".
        transform: a KeyTransform for keys; with an offset it needs ``positions``, int [tokens].
        on_nonfinite: "raise", or "clamp" NaN to 0 and infinities to fp16's largest.

    Raises ValueError or TypeError naming the argument, its value and what is allowed.
    """
    if x.dtype not in ops.FLOATS:
        raise TypeError(f"x is {x.dtype}; allowed: float16, bfloat16, float32")
    if x.dim() not in (3, 4):
        raise ValueError(
            f"x has shape {tuple(x.shape)}; expected [tokens, kv_heads, head_dim] or "
            "[blocks, block_size, kv_heads, head_dim]"
        )
    if axis not in ("token", "channel"):
        raise ValueError(f"axis is {axis!r}; allowed: 'token', 'channel'")
    if on_nonfinite not in ("raise", "clamp"):
        raise ValueError(f"on_nonfinite is {on_nonfinite!r}; allowed: 'raise', 'clamp'")
    x = x.detach()
    blocked = x.dim() == 4
    if blocked:
        block_size = x.shape[1]
        x = x.flatten(0, 1)
    check_count("block_size", block_size)
    tokens, kv_heads, head_dim = x.shape
    if not tokens:
        raise ValueError("x has no tokens")
    check_head_dim(head_dim)
    scheme = ops.token_scheme(bits, symmetric, False if axis == "channel" and rotate is None else rotate)
    if transform is not None:
        if (transform.kv_heads, transform.head_dim) != (kv_heads, head_dim):
            raise ValueError(
                f"transform is for {transform.kv_heads} heads of {transform.head_dim}; x has {kv_heads} of {head_dim}"
            )
        if transform.rotate is not None:
            scheme = replace(scheme, rotate=transform.rotate)
        if transform.mu is not None:
            if positions is None:
                raise ValueError("positions is None; a transform with an offset needs the position of each token")
            if tuple(positions.shape) != (tokens,):
                raise ValueError(f"positions has shape {tuple(positions.shape)}; expected [{tokens}]")
            if positions.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"positions is {positions.dtype}; allowed: int32, int64")
            if int(positions.min()) < 0:
                raise ValueError(f"positions holds {int(positions.min())}; positions start at 0")
            positions = positions.to(x.device)
    if on_nonfinite == "raise":
        ops.check_finite("x", x)
    else:
        x = ops.finite(x)
    on_kernel = x.is_cuda and axis == "token" and block_size in PAGE_SIZES
    codes, scales, zeros = (_by_kernel if on_kernel else _by_torch)(x, scheme, block_size, axis, transform, positions)
    return QuantizedBlocks(
        codes, scales, zeros, scheme, axis, tokens, x.dtype, blocked, transform,
        positions if transform is not None and transform.mu is not None else None,
    )  # fmt: skip


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _by_torch(
    x: torch.Tensor,
    scheme: TensorScheme,
    block_size: int,
    axis: Axis,
    transform: KeyTransform | None,
    positions: torch.Tensor | None,
) -> Parts:
    # contiguous, so that the rotation rounds the same whatever the strides of x
    values = reference.encode(x.float().contiguous(), scheme, transform, positions)
    missing = -values.shape[0] % block_size
    if missing:  # repeating the last token leaves a block's channel ranges as they are
        values = torch.cat([values, values[-1:].expand(missing, -1, -1)])
    values = values.unflatten(0, (-1, block_size)).transpose(1, 2)  # [blocks, kv_heads, block_size, head_dim]
    dim = -1 if axis == "token" else -2
    codes, scales, zeros = reference.quantize_rows(values, scheme, dim)
    return reference.pack(codes, scheme.bits), scales.squeeze(dim), None if zeros is None else zeros.squeeze(dim)


def _by_kernel(
    x: torch.Tensor,
    scheme: TensorScheme,
    block_size: int,
    axis: Axis,
    transform: KeyTransform | None,
    positions: torch.Tensor | None,
) -> Parts:
    from kvq.kernels.quantize import write

    tokens, kv_heads, head_dim = x.shape
    blocks = -(-tokens // block_size)
    layout = PageLayout(QuantScheme("blocks", scheme, scheme), block_size, kv_heads, head_dim)
    pages = torch.zeros(blocks, layout.page_bytes, dtype=torch.uint8, device=x.device)
    tables = None
    if transform is not None:
        reach = 0 if positions is None else int(positions.max())
        tables = DeviceTransform.build(transform, block_size, reach, x.device)
    x = x if x.stride(2) == 1 else x.contiguous()
    slots = torch.arange(tokens, device=x.device)
    write(pages, layout, x, None, slots, ops.new_status(x.device), positions, tables, check=False)
    views = reference.plane_views(pages, layout)
    scales = views.k_scales
    return (
        views.k_codes.contiguous(),
        scales[..., 0].contiguous(),
        None if scheme.symmetric else scales[..., 1].contiguous(),
    )
