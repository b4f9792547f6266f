"""``kvq size``: how many tokens of a model's KV cache a memory budget holds, for each storage format."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.arguments import number
from kvq.page import PAGE_SIZES, PageLayout
from kvq.scheme import INT4, INT8, K8V4

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Shape:
    """What decides the size of a model's KV cache."""

    layers: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "llama-3-8b": Shape(32, 8, 128),
    "llama-3-70b": Shape(80, 8, 128),
    "llama-3.2-1b": Shape(16, 8, 64),
    "llama-3.2-3b": Shape(28, 8, 128),
    "mistral-7b": Shape(32, 8, 128),
    "qwen2.5-0.5b": Shape(24, 2, 64),
    "qwen2.5-7b": Shape(28, 4, 128),
    "qwen2.5-32b": Shape(64, 8, 128),
    "qwen3-8b": Shape(36, 8, 128),
    "smollm2-135m": Shape(30, 3, 64),
}


def parse_bytes(text: str) -> int:
    """Bytes of ``24GiB``, ``24G``, ``1.5TB`` or a plain number. Raises ValueError for anything else or for none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in UNITS or not 0 < float(match.group(1)) < 1e15:
        raise ValueError(f"memory is {text!r}; write a positive number with a unit, such as 24GiB or 500MB")
    return int(float(match.group(1)) * UNITS[unit])


def read_shape(model: str) -> Shape:
    """Shape of a known model name, of a Hugging Face model folder, or of its config.json.

    Raises ValueError for models whose cache is not full attention with K and V in every layer.
    """
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model is {model!r}: neither a folder with a config.json nor a known name ({', '.join(sorted(SHAPES))})"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if isinstance(config, dict) and config.get("text_config") is not None:
        config = config["text_config"]
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {config!r:.80}; it must be the config.json of a language model, an object")
    if "kv_lora_rank" in config:
        raise ValueError(f"{path}: latent attention (MLA) keeps no K and V per head; kvq does not store it")
    kinds = config.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"{path}: layer_types is {kinds!r:.80}; it must be a list of texts")
    layer_types = set(kinds)
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if layer_types != {"full_attention"} or window is not None:
        found = ", ".join(sorted(layer_types)) + (f" with a window of {window} tokens" if window is not None else "")
        raise ValueError(f"{path}: layers of kind {found}; size is computed for full attention in every layer")

    def count(name: str, default: int | None = None) -> int:
        value = default if config.get(name) is None else config[name]
        if value is None:
            raise ValueError(f"{path} has no {name!r}; is it the config.json of a language model?")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**6:
            raise ValueError(f"{path}: {name} is {value!r:.80}; it must be a whole number from 1 to a million")
        return value

    heads = count("num_attention_heads")
    head_dim = count("hidden_size") // heads if config.get("head_dim") is None else None
    return Shape(count("num_hidden_layers"), count("num_key_value_heads", heads), count("head_dim", head_dim))


def heads_per_rank(kv_heads: int, tp: int) -> int:
    """KV heads that one of ``tp`` ranks holds: split evenly, or copied when there are more ranks than heads."""
    if tp < 1 or (kv_heads % tp and tp % kv_heads):
        raise ValueError(f"tp is {tp}; with {kv_heads} KV heads it must divide them or be a multiple of them")
    return max(1, kv_heads // tp)


@dataclass(frozen=True)
class Capacity:
    """What a budget holds in one format. ``tokens`` counts those of all sequences together."""

    scheme: str
    stored_bits: float
    tokens: int
    recent_bytes: int
    effective_bits: float
    ratio: float


def capacities(
    shape: Shape, budget: int, *, tp: int = 1, page_size: int = 64, sequences: int = 16, recent_tokens: int = 1024
) -> list[Capacity]:
    """Capacity of ``budget`` bytes on each rank for bf16 and every preset.

    Quantized pages cover every token. On top come, for each of ``sequences``, the native pages of its last two turns
    (``recent_tokens``, rounded outward to pages) and of its first page; ``effective_bits`` spreads them over all.
    """
    if min(sequences, recent_tokens) < 0:
        raise ValueError(f"sequences is {sequences} and recent tokens {recent_tokens}; neither may be negative")
    kv_heads = heads_per_rank(shape.kv_heads, tp)
    elements = 2 * shape.layers * kv_heads * shape.head_dim  # of one token, K and V
    # A window of n tokens that starts anywhere touches up to ceil((n - 1) / page) + 1 pages; one more holds the sinks.
    window_pages = math.ceil((recent_tokens - 1) / page_size) + 1 if recent_tokens else 0
    native_tokens = sequences * (window_pages + 1) * page_size

    bf16_tokens = budget // (2 * elements * page_size) * page_size
    rows = [Capacity("bf16", 16.0, bf16_tokens, 0, 16.0, 1.0)]
    for scheme in (INT8, K8V4, INT4):
        layout = PageLayout(scheme, page_size, kv_heads, shape.head_dim)
        recent = native_tokens * elements * 2
        tokens = layout.num_pages(budget - recent, shape.layers) * page_size
        if tokens < page_size:
            raise ValueError(
                f"the native pages of {sequences} sequences with {recent_tokens} recent tokens take "
                f"{recent / 2**30:.2f} GiB of {budget / 2**30:.2f} GiB; give more memory, or fewer --sequences or "
                "--recent-tokens"
            )
        used = tokens // page_size * shape.layers * layout.page_bytes + recent
        rows.append(
            Capacity(
                scheme.name,
                scheme.bits_per_element(shape.head_dim),
                tokens,
                recent,
                8 * used / (tokens * elements),
                tokens / bf16_tokens if bf16_tokens else math.inf,
            )
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvq size", description=__doc__)
    parser.add_argument("model", help="folder or config.json of a Hugging Face model, or a name: " + ", ".join(SHAPES))
    parser.add_argument("--memory", required=True, help="memory for the KV cache on each GPU, such as 24GiB")
    parser.add_argument("--tp", type=number(int, 1), default=1, help="tensor parallel ranks (default %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, choices=PAGE_SIZES, help="tokens (default %(default)s)")
    count = number(int, 0, 10**7)
    parser.add_argument("--sequences", type=count, default=16, help="with native recent turns (default %(default)s)")
    parser.add_argument("--recent-tokens", type=count, default=1024, help="of a sequence's last two turns, %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)

    shape, budget = read_shape(args.model), parse_bytes(args.memory)
    rows = capacities(
        shape,
        budget,
        tp=args.tp,
        page_size=args.page_size,
        sequences=args.sequences,
        recent_tokens=args.recent_tokens,
    )
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    table = Table(
        title=f"{args.model}: {shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}, "
        f"{args.memory} a GPU, tp {args.tp}",
        caption=f"native pages for {args.sequences} sequences x {args.recent_tokens} recent tokens and the first page",
    )
    for name in ("format", "bits stored", "bits with native pages", "native pages", "tokens", "against bf16"):
        table.add_column(name, justify="left" if name == "format" else "right")
    for row in rows:
        table.add_row(
            row.scheme,
            f"{row.stored_bits:.3f}",
            f"{row.effective_bits:.3f}",
            f"{row.recent_bytes / 2**30:.2f} GiB",
            f"{row.tokens:,}",
            f"{row.ratio:.2f}x",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
