"""Block-sparse decode on a real model's keys and queries: ``python -m bench.skip --model NAME [--device cuda]``.

One text of ``--context`` tokens goes through the model once. Each layer's keys, values and last query become one
sequence of a decode batch, quantized to INT4, its first page and last 128 tokens hot. For every threshold the table
shows the pages whose values were left out, the bytes that saves, the error against the same cache read whole, and, on
a GPU, the time.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from bench import models, texts
from bench.accuracy import load_model
from kvq import INT4, DecodePlan, PageLayout, ops, reference
from kvq.kernels.decode import decode
from kvq.kernels.timing import replay_us
from kvq.reference import HotPool

THRESHOLDS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2)
RECENT = 128
PAGE = 64


def capture(model: Any, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Query of the last token [heads, D], keys and values [T, kv_heads, D] of each layer, after RoPE."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found = []

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kw: Any):
        found.append((query[0, :, -1], key[0].transpose(0, 1), value[0].transpose(0, 1)))
        return sdpa_attention_forward(module, query, key, value, mask, **kw)

    AttentionInterface.register("kvq_capture", attention)
    model.set_attn_implementation("kvq_capture")
    with torch.no_grad():
        model.get_decoder()(input_ids=ids[None], use_cache=False)
    return found


def long_text(encode: texts.Encode, data: Path, length: int) -> list[int]:
    """The first agent session that is long enough, else the encyclopedia."""
    for window in texts.windows(encode, "evaluation", data, length):
        if window.kind == "agent":
            return list(window.ids)
    return list(texts.windows(encode, "evaluation", data, length)[0].ids)


class Batch:
    """One decode sequence a layer, over ``copies`` caches of the same content."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], copies: int, dtype: torch.dtype):
        device = layers[0][1].device
        tokens, kv_heads, head_dim = layers[0][1].shape
        self.layout = PageLayout(INT4, PAGE, kv_heads, head_dim)
        each = -(-tokens // PAGE)
        self.tables = torch.arange(len(layers) * each, dtype=torch.int32, device=device).view(len(layers), each)
        self.lens = torch.full((len(layers),), tokens, dtype=torch.int32, device=device)
        self.query = torch.stack([q for q, _, _ in layers]).to(dtype)
        is_hot = torch.zeros(each, dtype=torch.bool, device=device)
        is_hot[0] = True
        is_hot[(tokens - RECENT) // PAGE :] = True
        self.cold_pages = int((~is_hot).sum()) * len(layers)
        hot = is_hot.repeat(len(layers))
        index = torch.where(hot, hot.cumsum(0) - 1, -1).to(torch.int32)
        pool = torch.zeros(int(hot.sum()), 2, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        self.caches = []
        for _ in range(copies):
            pages = torch.zeros(len(layers) * each, self.layout.page_bytes, dtype=torch.uint8, device=device)
            slots = torch.arange(tokens, device=device)
            for i, (_, key, value) in enumerate(layers):
                where = slots + i * each * PAGE
                ops.write_pages(pages, self.layout, key.to(dtype), value.to(dtype), where, hot=HotPool(pool, index))
            self.caches.append((pages, HotPool(pool, index)))

    def ideal(self, threshold: float | None) -> torch.Tensor:
        """Attention in float64 without the pages that ``threshold`` lets go; None: over the whole cache."""
        pages, hot = self.caches[0]
        return reference.paged_attention_decode(
            self.query[:, None], pages, self.layout, self.tables, self.lens, self.layout.head_dim**-0.5, None, hot,
            dtype=torch.float64, skip_threshold=threshold,
        )[0][:, 0]  # fmt: skip

    def run(self, threshold: float | None, exact: torch.Tensor) -> dict[str, Any]:
        """A row of the table. Time is of CUDA-graph replays that go round the caches."""
        row: dict[str, Any] = {"threshold": threshold}
        if not self.query.is_cuda:
            got = self.ideal(threshold)
            return row | {"error": float((got - exact).norm() / exact.norm())}
        num_seqs, heads, _ = self.query.shape
        plan = DecodePlan(
            self.layout, heads, num_seqs, int(self.lens[0]), hot=True, skip_threshold=threshold,
            device=self.query.device,
        )  # fmt: skip
        plan.update(self.tables, self.lens, self.caches[0][1])
        out = torch.empty(num_seqs, 1, heads, self.layout.head_dim, device=self.query.device)
        lse = torch.empty(num_seqs, 1, heads, device=self.query.device)
        scale = self.layout.head_dim**-0.5
        calls = [
            partial(decode, plan, self.query[:, None], pages, self.tables, self.lens, scale, out, lse, None, hot)
            for pages, hot in self.caches
        ]
        calls[0]()
        error = float((out[:, 0].double() - exact).norm() / exact.norm())
        plan.skip_fraction()
        calls[0]()
        skipped = plan.skip_fraction()
        values = self.layout.scheme.value.bits_per_element(self.layout.head_dim) * PAGE * self.layout.head_dim / 8
        saved = skipped * self.cold_pages * values * self.layout.kv_heads
        total = self.cold_pages * self.layout.page_bytes
        return row | {
            "skipped": skipped, "bytes_saved": saved / total, "error": error, "time_us": replay_us(calls),
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.skip", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="packaged name or path of a transformers model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--data", type=Path, default=texts.DEFAULT_DATA)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args(argv)
    if args.context < 4 * RECENT:
        parser.error(f"--context is {args.context}; at least {4 * RECENT}")
    model, encode = load_model(models.model_path(args.model), args.device)
    ids = torch.tensor(long_text(encode, args.data, args.context), device=args.device)
    layers = capture(model, ids)
    on_gpu = args.device.startswith("cuda")
    size = len(layers) * args.context * layers[0][1][0].numel()  # about the bytes of an INT4 cache
    copies = max(1, -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // size)) if on_gpu else 1
    batch = Batch(layers, copies, torch.bfloat16 if on_gpu else torch.float32)
    exact = batch.ideal(None)
    rows = [batch.run(threshold, exact) for threshold in (None, *THRESHOLDS)]
    for row in rows:
        if on_gpu:
            row["speedup"] = rows[0]["time_us"] / row["time_us"]
    shown = [{k: "off" if v is None else v for k, v in row.items()} for row in rows]
    print(tabulate(shown, headers="keys", floatfmt=".3g"))
    where = torch.cuda.get_device_name() if on_gpu else "CPU reference: what may be left out, no time"
    print(f"\n{args.model}, {len(layers)} layers x {args.context} tokens, {where}")
    if args.json is not None:
        args.json.write_text(json.dumps({"model": args.model, "context": args.context, "where": where, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
