"""KeyTransform: what is taken off a key before it is quantized, so that INT4 survives every model.

A stored key is ``H ((k - R(pos) mu) / s)``: the head's mean key before RoPE (``mu``, or the bias of k_proj) is turned
by the rotary rotation R of the token's position and subtracted, each rotary pair is divided by a static scale ``s``,
and a Hadamard matrix H spreads what is left. ``q . k`` is recovered exactly: ``(H (s q)) . stored + q . R(pos) mu``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvq.scheme import QuantScheme, check_count, check_head_dim


@dataclass(frozen=True, eq=False)
class KeyTransform:
    """The static transform of one layer's keys.

    Args:
        kv_heads, head_dim: heads of this layer (of this rank, after slicing) and their size.
        mu: float32 [kv_heads, head_dim], offset before RoPE; None for no offset.
        pair_scale: float32 [kv_heads, head_dim // 2], positive, one a rotary pair (``pair_dims``); None for ones.
        inv_freq: float64 [rotary_dim // 2], radians a position, the model's own (scaling variants included).
        rotary_dim: leading dims of a head that RoPE turns; the rest form pairs of frequency 0.
        interleaved: pairs are (2j, 2j+1) (GPT-J) instead of (j, j + rotary_dim / 2) (NeoX, Llama, Qwen).
        rotate: overrides the scheme's Hadamard rotation of K and V; None leaves it to the scheme.

    Raises ValueError for shapes that do not fit, non-finite values and scales that are not positive.
    """

    kv_heads: int
    head_dim: int
    mu: torch.Tensor | None = None
    pair_scale: torch.Tensor | None = None
    inv_freq: torch.Tensor | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    rotate: bool | None = None

    def __post_init__(self) -> None:
        check_count("kv_heads", self.kv_heads)
        check_head_dim(self.head_dim)
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim is {rotary_dim}; it must be even, in 2..{self.head_dim}")
        object.__setattr__(self, "rotary_dim", rotary_dim)
        if self.mu is not None and self.inv_freq is None:
            raise ValueError("mu is given without inv_freq; an offset needs the model's rotary frequencies")
        shapes = {
            "mu": (self.kv_heads, self.head_dim),
            "pair_scale": (self.kv_heads, self.head_dim // 2),
            "inv_freq": (rotary_dim // 2,),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} holds NaN or inf")
            dtype = torch.float64 if name == "inv_freq" else torch.float32
            object.__setattr__(self, name, tensor.detach().to("cpu", dtype).contiguous())
        if self.mu is not None and not self.mu.any():
            object.__setattr__(self, "mu", None)  # an offset of zeros is none
        if self.pair_scale is not None and not (self.pair_scale > 0).all():
            raise ValueError("pair_scale holds values that are not positive")

    @property
    def pair_dims(self) -> torch.Tensor:
        """int64 [head_dim // 2, 2]: the two dims of each pair; rotary pairs first, then the dims RoPE leaves alone."""
        rot = self.rotary_dim
        assert rot is not None
        j = torch.arange(rot // 2)
        turned = torch.stack([2 * j, 2 * j + 1] if self.interleaved else [j, j + rot // 2], -1)
        return torch.cat([turned, torch.arange(rot, self.head_dim).view(-1, 2)])

    @property
    def pair_freq(self) -> torch.Tensor:
        """float64 [head_dim // 2]: radians a position of each pair, 0 for dims that RoPE leaves alone."""
        freq = torch.zeros(self.head_dim // 2, dtype=torch.float64)
        if self.inv_freq is not None:
            freq[: self.inv_freq.numel()] = self.inv_freq
        return freq

    @property
    def pair_mu(self) -> torch.Tensor:
        """float32 [kv_heads, head_dim // 2, 2]: the offset by pairs; zeros without one."""
        if self.mu is None:
            return torch.zeros(self.kv_heads, self.head_dim // 2, 2)
        return self.mu[:, self.pair_dims]

    @property
    def dim_scale(self) -> torch.Tensor:
        """float32 [kv_heads, head_dim]: the pair scale spread over the dims; ones without one."""
        scale = torch.ones(self.kv_heads, self.head_dim)
        if self.pair_scale is not None:
            scale[:, self.pair_dims.flatten()] = self.pair_scale.repeat_interleave(2, -1)
        return scale

    @property
    def num_pairs(self) -> int:
        """Most pairs of a head that carry an offset; decode pays for as many on every head."""
        return int((self.pair_mu != 0).any(-1).sum(-1).max())

    @property
    def is_identity(self) -> bool:
        """Whether keys are stored as they are, but for the scheme's own rotation."""
        return self.mu is None and self.pair_scale is None and self.rotate is None

    @property
    def digest(self) -> str:
        """12 hex digits that name the transform; caches of different digests must never mix."""
        h = hashlib.sha256(
            f"{self.kv_heads},{self.head_dim},{self.rotary_dim},{self.interleaved},{self.rotate}".encode()
        )
        for tensor in (self.mu, self.pair_scale, self.inv_freq):
            h.update(b"-" if tensor is None else tensor.numpy().tobytes())
        return h.hexdigest()[:12]

    def scheme_for(self, scheme: QuantScheme) -> QuantScheme:
        """``scheme`` with this transform's ``rotate`` in place of its own, where it has one."""
        if self.rotate is None:
            return scheme
        return replace(
            scheme,
            key=replace(scheme.key, rotate=self.rotate),
            value=replace(scheme.value, rotate=self.rotate),
        )

    def slice_heads(self, start: int, stop: int) -> KeyTransform:
        """The transform of kv heads ``start..stop`` (tensor parallelism)."""
        if not 0 <= start < stop <= self.kv_heads:
            raise ValueError(f"heads {start}..{stop} are not within 0..{self.kv_heads}")
        mu, scale = self.mu, self.pair_scale
        return replace(
            self,
            kv_heads=stop - start,
            mu=None if mu is None else mu[start:stop],
            pair_scale=None if scale is None else scale[start:stop],
        )

    def keep_pairs(self, count: int) -> KeyTransform:
        """The same with the offset only on the ``count`` pairs of each head where mu over the pair scale is largest."""
        if self.mu is None or count >= self.num_pairs:
            return self
        if count < 1:
            return replace(self, mu=None)
        pair_mu = self.pair_mu
        size = pair_mu.norm(dim=-1)
        if self.pair_scale is not None:
            size = size / self.pair_scale
        keep = torch.zeros_like(size, dtype=torch.bool).scatter_(1, size.topk(count, dim=1).indices, True)
        mu = torch.zeros_like(self.mu)
        mu[:, self.pair_dims.flatten()] = (pair_mu * keep[..., None]).flatten(1)
        return replace(self, mu=mu)

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Tensors to save; with ``metadata`` they rebuild the transform (``from_tensors``)."""
        named = {"mu": self.mu, "pair_scale": self.pair_scale, "inv_freq": self.inv_freq}
        return {prefix + k: v for k, v in named.items() if v is not None}

    def metadata(self) -> dict[str, Any]:
        return {
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
            "rotate": self.rotate,
            "digest": self.digest,
        }

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor], metadata: dict[str, Any], prefix: str = "") -> KeyTransform:
        """Inverse of ``tensors`` and ``metadata``. Raises ValueError when the digest does not match."""
        fields: dict[str, Any] = {k: v for k, v in metadata.items() if k != "digest"}
        fields |= {k: tensors.get(prefix + k) for k in ("mu", "pair_scale", "inv_freq")}
        transform = KeyTransform(**fields)
        if transform.digest != metadata["digest"]:
            raise ValueError(f"transform digest is {transform.digest}; the file says {metadata['digest']}")
        return transform

    @staticmethod
    def from_model(model: Any) -> list[KeyTransform]:
        """One transform a layer that needs no text: mu is the bias of k_proj where there is one. See calibrate.py."""
        from kvq.calibrate import transforms_from_model

        return transforms_from_model(model)


def format_name(scheme: QuantScheme, transform: KeyTransform | None) -> str:
    """Name of the stored format with its transform's digest, e.g. ``kvq-int4-v1`` or ``kvq-int4-v1+3f2a...``."""
    return scheme.format_name if transform is None else f"{scheme.format_name}+{transform.digest}"


def measured_name(scheme: QuantScheme, transforms: Sequence[KeyTransform] | None = None) -> str:
    """Name that figures of speed and of accuracy carry: the format, how it quantizes, and the layers' transforms.

    E.g. ``kvq-int4-v1#5a01c2d3`` where no layer changes its keys, else ``kvq-int4-v1#5a01c2d3+97161209217d``.
    """
    name = f"{scheme.format_name}#{scheme.digest}"
    if not transforms or all(t.is_identity for t in transforms):
        return name
    return f"{name}+{hashlib.sha256(''.join(t.digest for t in transforms).encode()).hexdigest()[:12]}"
