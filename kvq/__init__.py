"""kvq: KV-cache pages quantized to INT4 and INT8, and attention that reads them, in Triton."""

from kvq.blocks import QuantizedBlocks, quantize_blocks
from kvq.cache import PagedKVCache, paged_attention_decode
from kvq.calibrate import calibrate
from kvq.page import PageLayout
from kvq.plan import DecodeConfig, DecodePlan
from kvq.prefill import paged_attention_prefill
from kvq.scheme import INT4, INT4_SYM, INT8, K8V4, QuantScheme, TensorScheme
from kvq.transform import KeyTransform
from kvq.turns import TurnBook

__version__ = "0.1.0"

__all__ = [
    "INT4",
    "INT4_SYM",
    "INT8",
    "K8V4",
    "DecodeConfig",
    "DecodePlan",
    "KeyTransform",
    "PageLayout",
    "PagedKVCache",
    "QuantScheme",
    "QuantizedBlocks",
    "TensorScheme",
    "TurnBook",
    "calibrate",
    "paged_attention_decode",
    "paged_attention_prefill",
    "quantize_blocks",
]
