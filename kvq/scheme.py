"""What is stored: bits, symmetry and rotation of K and of V."""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass, replace
from numbers import Integral
from typing import Any

FORMAT_VERSION = 1
ENCODER = 3  # raised when the same values are quantized otherwise; what reads pages does not care
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


def is_integer(x: Any) -> bool:
    """Whether ``x`` is an integer and no truth value."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless the argument ``name`` is an integer of at least ``least``."""
    if not (is_integer(value) and value >= least):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")


def check_head_dim(head_dim: int) -> None:
    """Raise ValueError unless the page format and its kernels support ``head_dim``."""
    if not is_integer(head_dim) or head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim!r}; allowed: {', '.join(map(str, HEAD_DIMS))}")


@dataclass(frozen=True)
class TensorScheme:
    """How one tensor (K or V) of a token and head is stored.

    ``bits`` codes an element; a fp16 scale a token and head, and, unless ``symmetric``, a fp16 zero beside it.
    ``rotate``: a normalised Hadamard matrix is applied along head_dim before quantizing.
    ``clip``: part of a row's range that the codes span. A rotated row is close to normal, and at 4 bits 0.95 of its
    range gives 5 % (64 dims) to 7 % (128 dims) less mean squared error than all of it, for nothing.
    ``unshrunk``: what is stored is stretched about the row's mean by ``gain``, which makes up for what the clip and
    the rounding take. Keys need it: they are compared with recent ones in native precision.
    """

    bits: int
    symmetric: bool
    rotate: bool
    clip: float = 1.0
    unshrunk: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}; allowed: 4 or 8")
        if not 0.5 <= self.clip <= 1.0:
            raise ValueError(f"clip is {self.clip}; allowed: 0.5 to 1")
        if self.unshrunk and (self.bits, self.clip) != (4, 0.95):
            raise ValueError(f"unshrunk with bits {self.bits} and clip {self.clip}; its gain is known for 4 and 0.95")

    @property
    def planes(self) -> int:
        """Elements in a uint16 word: word j holds dims j, j + W, ... where W = head_dim / planes."""
        return 16 // self.bits

    @property
    def levels(self) -> int:
        return 1 << self.bits

    def gain(self, head_dim: int) -> float:
        """By how much stored rows are stretched: 1, or sum x x / sum x y of normal rows x that come back as y.

        The formula is within 5e-5 of that for 64 to 256 dims (tests/kvq/test_reference.py).
        """
        if not self.unshrunk:
            return 1.0
        size, power = (0.0101, 0.58) if self.symmetric else (0.0094, 0.73)
        return 1 + size * (64 / head_dim) ** power

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of the codes of one token and head."""
        return head_dim * self.bits // 8

    def scale_bytes(self) -> int:
        """Bytes of the scale, and zero where there is one, of one token and head."""
        return 2 if self.symmetric else 4

    def bits_per_element(self, head_dim: int) -> float:
        return self.bits + 8.0 * self.scale_bytes() / head_dim


@dataclass(frozen=True)
class QuantScheme:
    """A storage format of KV pages: K and V schemes under a name and a format version.

    ``kvq.INT4``, ``kvq.INT8`` and ``kvq.K8V4`` are the presets; ``QuantScheme.parse`` reads their names.
    """

    name: str
    key: TensorScheme
    value: TensorScheme
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.version != FORMAT_VERSION:
            raise ValueError(f"version is {self.version}; this kvq reads and writes version {FORMAT_VERSION}")

    @property
    def format_name(self) -> str:
        """Name that keeps caches of different formats apart, e.g. ``kvq-int4-v1``."""
        return f"kvq-{self.name}-v{self.version}"

    @property
    def digest(self) -> str:
        """8 hex digits that name how values are quantized; figures of speed and accuracy carry it."""
        what = (ENCODER, self.version, astuple(self.key), astuple(self.value))
        return hashlib.sha256(repr(what).encode()).hexdigest()[:8]

    def bits_per_element(self, head_dim: int) -> float:
        """Mean stored bits of a K or V element, scales and zeros included."""
        check_head_dim(head_dim)
        return (self.key.bits_per_element(head_dim) + self.value.bits_per_element(head_dim)) / 2

    def page_bytes(self, page_size: int, kv_heads: int, head_dim: int) -> int:
        """Bytes of one page of one layer, K and V of all heads, scales included."""
        from kvq.page import PageLayout

        return PageLayout(self, page_size, kv_heads, head_dim).page_bytes

    @staticmethod
    def parse(name: str | QuantScheme) -> QuantScheme:
        """The preset called ``name`` (case and dashes do not matter). Raises ValueError for any other name."""
        if isinstance(name, QuantScheme):
            return name
        key = str(name).strip().lower().replace("_", "-").removeprefix("kvq-").removesuffix(f"-v{FORMAT_VERSION}")
        if key not in PRESETS:
            raise ValueError(f"scheme is {name!r}; allowed: {', '.join(sorted(PRESETS))}")
        return PRESETS[key]


_ROTATED = TensorScheme(4, symmetric=False, rotate=True, clip=0.95)
_ROTATED_SYM = TensorScheme(4, symmetric=True, rotate=True, clip=0.95)
_BYTES = TensorScheme(8, symmetric=True, rotate=False)

INT4 = QuantScheme("int4", replace(_ROTATED, unshrunk=True), _ROTATED)
INT4_SYM = QuantScheme("int4-sym", replace(_ROTATED_SYM, unshrunk=True), _ROTATED_SYM)
INT8 = QuantScheme("int8", _BYTES, _BYTES)
K8V4 = QuantScheme("k8v4", _BYTES, _ROTATED)
PRESETS = {s.name: s for s in (INT4, INT4_SYM, INT8, K8V4)}
