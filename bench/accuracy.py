"""What each storage format does to a real model's predictions: ``python -m bench.accuracy --model smollm2-135m``.

A text is fed teacher forced. In every layer, keys and values are stored in the format under test and read back before
attention, but for those that a recent window or the first tokens keep native. The prediction at each position is
compared with the unquantized model's. Storage is kvq.reference, the specification of the kernels; the model is float32.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from tabulate import tabulate

from bench import texts
from bench.models import model_path
from kvq import reference
from kvq.calibrate import Calibration, calibrate, load_calibration, transforms_from_model
from kvq.scheme import INT4, INT4_SYM, INT8, K8V4, QuantScheme, TensorScheme
from kvq.transform import KeyTransform, measured_name

PAGE = 64
SCORE_FROM = 256  # predictions before this position see too little stored context to tell formats apart

# Rows [tokens, kv_heads, head_dim] as they come back from storage, in the space in which they are quantized.
RoundTrip = Callable[[torch.Tensor], torch.Tensor]


# ---- formats


def per_token(scheme: TensorScheme, x: torch.Tensor) -> torch.Tensor:
    codes, scale, zero = reference.quantize_rows(x, scheme)
    return reference.dequantize_rows(codes, scale, zero, scheme, x.dtype)


def per_channel(scheme: TensorScheme, x: torch.Tensor) -> torch.Tensor:
    """KIVI's keys (https://arxiv.org/abs/2402.02750): a scale for each channel of a page, of its later tokens too."""
    pages = x.unflatten(0, (-1, PAGE))
    codes, scale, zero = reference.quantize_rows(pages, scheme, dim=1)
    return reference.dequantize_rows(codes, scale, zero, scheme, x.dtype).flatten(0, 1)


def integer_zero(x: torch.Tensor) -> torch.Tensor:
    """Asymmetric INT4 with a zero point that is a code: how vLLM stores INT4 rows."""
    lo, hi = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((hi - lo) / 15).half().float().clamp_min(1e-7)
    zero = (-lo / scale).round().clamp(0, 15)
    return ((x / scale).round() + zero).clamp(0, 15).sub(zero) * scale


@cache
def lloyd_max(levels: int = 16) -> torch.Tensor:
    """Levels of the least-squares quantizer of a normal variable (Lloyd 1982): each the mean of its own cell."""
    normal = torch.distributions.Normal(*torch.tensor([0.0, 1.0], dtype=torch.float64))
    points = torch.linspace(-2.5, 2.5, levels, dtype=torch.float64)
    end = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(1000):
        edges = torch.cat([-end, (points[1:] + points[:-1]) / 2, end])
        points = -normal.log_prob(edges).exp().diff() / normal.cdf(edges).diff()
    return points.float()


def codebook(x: torch.Tensor) -> torch.Tensor:
    """An fp16 norm and the nearest Lloyd-Max level of each rotated element: TurboQuant's keys, without its residual."""
    points = lloyd_max().to(x.device)
    norm = (x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5).half().float().clamp_min(1e-7)
    return points[torch.bucketize(x / norm, (points[1:] + points[:-1]) / 2)] * norm


def random_signs(head_dim: int) -> torch.Tensor:
    return torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(7)).float() * 2 - 1


def rotated(store: RoundTrip, x: torch.Tensor) -> torch.Tensor:
    """``store`` behind a Hadamard rotation with random signs."""
    signs = random_signs(x.shape[-1]).to(x.device)
    h = reference.hadamard(x.shape[-1], x.dtype, x.device)
    return store((x * signs) @ h) @ h * signs


def as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


@dataclass(frozen=True)
class Format:
    """What a row of the table stores.

    ``key`` and ``value``: a TensorScheme of the library, or a rival's round trip. ``bits``: of an element at a head
    size, scales included. ``offset``: where the transform of the keys comes from: "none", "bias"
    (KeyTransform.from_model), "random" (calibrated on random tokens) or "calibrated" (on text). ``scheme``: the
    library's, where it is one.
    """

    text: str
    key: TensorScheme | RoundTrip
    value: TensorScheme | RoundTrip
    bits: Callable[[int], float]
    offset: str = "none"
    scheme: QuantScheme | None = None

    def name(self, transforms: dict[str, list[KeyTransform]]) -> str:
        """What was measured (kvq.transform.measured_name), "-" for a rival's format."""
        return "-" if self.scheme is None else measured_name(self.scheme, transforms.get(self.offset))


def library(text: str, scheme: QuantScheme, offset: str = "none") -> Format:
    return Format(text, scheme.key, scheme.value, scheme.bits_per_element, offset, scheme)


SHRUNK = replace(INT4, name="int4-shrunk", key=replace(INT4.key, unshrunk=False))
PLAIN4 = TensorScheme(4, symmetric=False, rotate=False)
VLLM4 = partial(rotated, integer_zero)
FORMATS = {
    "bf16": Format("K and V rounded to bfloat16: the floor", as_bfloat16, as_bfloat16, lambda d: 16.0),
    "int8": library("INT8, k_proj.bias as offset", INT8, "bias"),
    "int8-plain": library("INT8, no offset", INT8),
    "k8v4": library("K8V4, k_proj.bias as offset", K8V4, "bias"),
    "int4": library("INT4, k_proj.bias as offset", INT4, "bias"),
    "int4-random": library("INT4, calibrated on random tokens", INT4, "random"),
    "int4-calibrated": library("INT4, calibrated", INT4, "calibrated"),
    "int4-shrunk": library("INT4, calibrated, keys not stretched", SHRUNK, "calibrated"),
    "int4-sym": library("INT4 symmetric, k_proj.bias as offset", INT4_SYM, "bias"),
    "int4-sym-calibrated": library("INT4 symmetric, calibrated", INT4_SYM, "calibrated"),
    "int4-hadamard": library("INT4, rotation but no offset", INT4),
    "int4-plain": Format("INT4, neither rotation nor offset", PLAIN4, PLAIN4, INT4.bits_per_element),
    "channel": Format(
        "K per channel and 64-token page (KIVI)",
        partial(per_channel, PLAIN4),
        PLAIN4,
        lambda d: 4 + (32 / PAGE + 32 / d) / 2,
    ),
    "integer-zero": Format("random Hadamard, integer zero (vLLM's INT4)", VLLM4, VLLM4, lambda d: 4 + 20 / d),
    "codebook": Format(
        "random Hadamard, K Lloyd-Max (TurboQuant)", partial(rotated, codebook), PLAIN4, lambda d: 4 + 24 / d
    ),
}


def store(kind: TensorScheme | RoundTrip, x: torch.Tensor, transform: KeyTransform | None, positions: torch.Tensor):
    """``x`` [tokens, kv_heads, head_dim] float32 stored and read back, in the original space."""
    if not isinstance(kind, TensorScheme):
        return kind(x)
    stored = per_token(kind, reference.encode(x, kind, transform, positions))
    return reference.decode(stored, kind, transform, positions)


# ---- which keys are native


def native_start(window: str, length: int, turn_starts: Sequence[int]) -> torch.Tensor | None:
    """int64 [length]: the first index that position t still sees in native precision, None if there is none.

    ``window``: a number of tokens, t's own included, or "turns": the turn of t and the one before it, rounded outward
    to pages.
    """
    t = torch.arange(length)
    if window == "turns":
        starts = torch.tensor(turn_starts)
        turn = torch.searchsorted(starts, t, right=True) - 1
        return starts[(turn - 1).clamp(min=0)] // PAGE * PAGE
    return t - int(window) + 1 if int(window) else None


def mixed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stored_key: torch.Tensor,
    stored_value: torch.Tensor,
    start: torch.Tensor | None,
    scale: float,
    block: int = 256,
) -> torch.Tensor:
    """Causal attention [heads, T, D] where position t reads index j native for j >= start[t] and stored otherwise.

    query [heads, T, D], the others [kv_heads, T, D].
    """
    kv_heads, length = key.shape[:2]
    query = query.unflatten(0, (kv_heads, -1)) * scale
    out = torch.empty_like(query)
    for begin in range(0, length, block):
        end = min(begin + block, length)
        q = query[:, :, begin:end].flatten(1, 2)
        t = torch.arange(begin, end, device=key.device)[:, None]
        scores = (q @ stored_key[:, :end].mT).unflatten(1, (-1, end - begin))
        low = begin if start is None else min(begin, max(0, int(start[begin])))
        j = torch.arange(low, end, device=key.device)[None]
        native = torch.zeros_like(j > t) if start is None else j >= start[begin:end, None].to(j.device)
        if start is not None:
            exact = (q @ key[:, low:end].mT).unflatten(1, (-1, end - begin))
            scores[..., low:] = torch.where(native, exact, scores[..., low:])
        scores[..., low:] = scores[..., low:].masked_fill(j > t, -math.inf)
        probs = scores.softmax(-1)
        result = probs.flatten(1, 2) @ stored_value[:, :end]
        if start is not None:
            recent = (probs[..., low:] * native).flatten(1, 2)
            result += recent @ (value - stored_value)[:, low:end]
        out[:, :, begin:end] = result.unflatten(1, (-1, end - begin))
    return out.flatten(0, 1)


# ---- running a model


@dataclass(frozen=True)
class Row:
    """One line of the table: a format, its recent window and how many first tokens stay native."""

    format: str
    window: str
    first: int

    @property
    def label(self) -> str:
        return f"{self.format}/{self.window}/{self.first}"


@dataclass(frozen=True)
class WindowResult:
    """Means over the scored positions of one window of a ``kind`` of text: KL and losses in nats a token."""

    kind: str
    kl: float
    loss: float
    reference_loss: float
    top1: float


@dataclass
class Result:
    """What a row gave, window by window.

    ``weights``: of each kind of text in the pooled figures, so that a pool of more windows of one kind has the same
    meaning as the small one (bench.texts.WEIGHTS).
    """

    weights: dict[str, float]
    windows: list[WindowResult] = field(default_factory=list)

    def add(self, kind: str, exact: torch.Tensor, got: torch.Tensor, target: torch.Tensor) -> None:
        """Log-probabilities [n, vocabulary] of the unquantized and the quantized model, and the tokens that came."""
        kl = (exact.exp() * (exact - got)).sum(-1).double().mean()
        loss, reference_loss = (-x.gather(1, target[:, None]).double().mean() for x in (got, exact))
        top1 = (exact.argmax(-1) == got.argmax(-1)).double().mean()
        self.windows.append(WindowResult(kind, float(kl), float(loss), float(reference_loss), float(top1)))

    def pooled(self, value: Callable[[WindowResult], float]) -> tuple[float, float | None]:
        """Mean of ``value``, kinds of text weighted, and its standard error from how much windows of a kind differ.

        The error is None where a kind has only one window.
        """
        kinds = dict.fromkeys(w.kind for w in self.windows)
        total = sum(self.weights[kind] for kind in kinds)
        mean, error = 0.0, 0.0
        for kind in kinds:
            values = [value(w) for w in self.windows if w.kind == kind]
            share = self.weights[kind] / total
            mean += share * fmean(values)
            error = math.nan if len(values) < 2 else error + share**2 * variance(values) / len(values)
        return mean, None if math.isnan(error) else error**0.5

    def figures(self) -> dict[str, Any]:
        """Pooled figures and the windows they come from; perplexities are exp of the mean loss."""
        increase, error = self.pooled(lambda w: w.loss - w.reference_loss)
        kl, kl_error = self.pooled(lambda w: w.kl)
        return {
            "kl": kl,
            "kl_error": kl_error,
            "perplexity": math.exp(self.pooled(lambda w: w.reference_loss)[0]),
            "perplexity_change": math.exp(increase) - 1,
            "perplexity_error": error,
            "top1": self.pooled(lambda w: w.top1)[0],
            "by_window": [
                [w.kind, *(round(x, 6) for x in (w.kl, w.loss - w.reference_loss, w.top1))] for w in self.windows
            ],
        }


class Harness:
    """A transformers model whose attention can store its keys and values in a format first."""

    NAME = "kvq_accuracy"

    def __init__(self, model: Any, position_offset: int = 0, every: int = 1) -> None:
        from transformers import AttentionInterface

        self.model, self.every, self.position_offset = model, every, position_offset
        self.row: Row | None = None
        self.transforms: dict[str, list[KeyTransform]] = {}
        self.start: torch.Tensor | None = None
        AttentionInterface.register(self.NAME, self.attention)
        model.set_attn_implementation(self.NAME)

    def attention(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kw: Any):
        """transformers' attention interface: query [1, heads, T, D], key and value [1, kv_heads, T, D] after RoPE."""
        q, k, v = query[0], key[0], value[0]
        stored_k, stored_v = k, v
        if self.row is not None:
            kind = FORMATS[self.row.format]
            transform = self.transforms[kind.offset][module.layer_idx] if kind.offset != "none" else None
            positions = torch.arange(k.shape[1], device=k.device) + self.position_offset
            stored_k = store(kind.key, k.transpose(0, 1), transform, positions).transpose(0, 1)
            stored_v = store(kind.value, v.transpose(0, 1), None, positions).transpose(0, 1)
            first = self.row.first
            stored_k = torch.cat([k[:, :first], stored_k[:, first:]], 1)
            stored_v = torch.cat([v[:, :first], stored_v[:, first:]], 1)
        scale = kw.get("scaling") or q.shape[-1] ** -0.5
        out = mixed_attention(q, k, v, stored_k, stored_v, self.start if self.row is not None else None, scale)
        return out.transpose(0, 1)[None], None

    @torch.no_grad()
    def log_probs(self, ids: torch.Tensor, row: Row | None, turn_starts: Sequence[int] = ()) -> torch.Tensor:
        """float32 [scored positions, vocabulary] of one text [T]; ``row`` None: the unquantized model."""
        self.row = row
        self.start = None if row is None else native_start(row.window, len(ids), turn_starts)
        positions = torch.arange(len(ids), device=ids.device) + self.position_offset
        hidden = self.model.get_decoder()(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0][0]
        return self.model.get_output_embeddings()(hidden[SCORE_FROM : -1 : self.every]).float().log_softmax(-1)

    def compare(self, row: Row, window: texts.Window, exact: torch.Tensor, result: Result) -> None:
        ids = torch.tensor(window.ids, device=exact.device)
        got = self.log_probs(ids, row, window.turn_starts)
        result.add(window.kind, exact, got, ids[SCORE_FROM + 1 :: self.every])


def measure(
    harness: Harness,
    rows: Sequence[Row],
    windows: Sequence[texts.Window],
    on_window: Callable[[dict[Row, Result]], None] = lambda results: None,
    advance: Callable[[], None] = lambda: None,
) -> dict[Row, Result]:
    """Every row on every window. Rows with the window "turns" are measured on agent sessions only."""
    results = {row: Result(texts.WEIGHTS) for row in rows}
    device = next(harness.model.parameters()).device
    for window in windows:
        exact = harness.log_probs(torch.tensor(window.ids, device=device), None)
        for row in rows:
            if row.window != "turns" or window.turn_starts:
                harness.compare(row, window, exact, results[row])
            advance()
        on_window(results)
    return results


# ---- the command


def table(results: dict[Row, Result], head_dim: int, names: dict[str, str]) -> str:
    """``names``: of what was measured, by format."""
    lines = []
    for row, result in results.items():
        if not result.windows:
            continue
        f = result.figures()
        error = "" if f["perplexity_error"] is None else f" ± {100 * f['perplexity_error']:.2f}"
        lines.append(
            [
                FORMATS[row.format].text,
                f"{FORMATS[row.format].bits(head_dim):.3f}",
                f"{FORMATS[row.format].bits(128):.3f}",
                row.window,
                row.first,
                f"{100 * f['perplexity_change']:+.2f}{error} %",
                f"{f['kl']:.4f}",
                f"{100 * f['top1']:.1f} %",
                names[row.format],
            ]
        )
    head = [
        "format",
        f"bits (D={head_dim})",
        "bits (D=128)",
        "window",
        "first",
        "perplexity",
        "KL",
        "top-1",
        "measured",
    ]
    return tabulate(lines, head, tablefmt="github", disable_numparse=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="packaged model or a local Hugging Face folder")
    parser.add_argument("--schemes", default=",".join(FORMATS), help="comma-separated: %(default)s")
    parser.add_argument("--windows", default="0", help="native recent tokens: numbers or 'turns', e.g. 0,128,turns")
    parser.add_argument("--first", default="4", help="native first tokens, e.g. 4,64 (64: the whole first page)")
    parser.add_argument("--offset", type=int, default=0, help="position of the first token (default 0)")
    parser.add_argument("--texts", default="evaluation", choices=texts.PURPOSES, help="which set of windows")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N windows of each kind of text")
    parser.add_argument("--more", type=int, default=1, metavar="N", help="N times as many windows (see bench.texts)")
    parser.add_argument("--every", type=int, default=1, help="score every N-th position (default 1)")
    parser.add_argument("--calibration", type=Path, help="file of 'kvq calibrate'; default: calibrate now")
    parser.add_argument("--data", type=Path, default=texts.DEFAULT_DATA, help="default %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write results as JSON")
    args = parser.parse_args(argv)
    args.schemes = [s.strip() for s in args.schemes.split(",")]
    for name in args.schemes:
        if name not in FORMATS:
            parser.error(f"--schemes has {name!r}; allowed: {', '.join(FORMATS)}")
    args.windows = [w.strip() for w in args.windows.split(",")]
    for window in args.windows:
        if window != "turns" and not window.isdecimal():
            parser.error(f"--windows has {window!r}; allowed: a number of tokens, or turns")
    try:
        args.first = [int(n) for n in args.first.split(",")]
    except ValueError:
        parser.error(f"--first is {args.first!r}; allowed: numbers of tokens")
    return args


def load_model(path: Path, device: str) -> tuple[Any, texts.Encode]:
    """Model in float32 and its encoder of plain text (no special tokens)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.to(device).eval(), lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def limited(windows: list[texts.Window], limit: int | None) -> list[texts.Window]:
    """At most ``limit`` windows of each kind of text, kinds in turn, so that a run cut short has some of each."""
    by_kind = [[w for w in windows if w.kind == kind][:limit] for kind in dict.fromkeys(w.kind for w in windows)]
    placed = [((i + 0.5) / len(found), w) for found in by_kind for i, w in enumerate(found)]
    return [w for _, w in sorted(placed, key=lambda x: x[0])]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    model, encode = load_model(model_path(args.model), args.device)
    windows = limited(texts.windows(encode, args.texts, args.data, more=args.more), args.limit)
    rows = [Row(s, w, f) for f in args.first for w in args.windows for s in args.schemes]
    transforms: dict[str, list[KeyTransform]] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        if any(FORMATS[s].offset == "bias" for s in args.schemes):
            transforms["bias"] = transforms_from_model(model)
        if any(FORMATS[s].offset == "random" for s in args.schemes):
            transforms["random"] = calibrate(model).transforms
        if any(FORMATS[s].offset == "calibrated" for s in args.schemes):
            transforms["calibrated"] = _calibration(args, model, encode, progress).transforms
        harness = Harness(model, args.offset, args.every)
        harness.transforms = transforms
        names = {s: FORMATS[s].name(transforms) for s in args.schemes}
        task = progress.add_task("Measuring", total=len(rows) * len(windows))

        def on_window(results: dict[Row, Result]) -> None:
            if args.out:
                _write(args, results, names)

        results = measure(harness, rows, windows, on_window, lambda: progress.advance(task))
    counts = ", ".join(f"{sum(w.kind == k for w in windows)} {k}" for k in dict.fromkeys(w.kind for w in windows))
    print(f"{args.model}: {counts} windows of {len(windows[0].ids)} tokens, positions from {args.offset}\n")
    print(table(results, model.config.get_text_config().head_dim, names))
    return 0


def _calibration(args: argparse.Namespace, model: Any, encode: texts.Encode, progress: Progress) -> Calibration:
    if args.calibration:
        return load_calibration(args.calibration, model)
    found = texts.windows(encode, "calibration", args.data)
    task = progress.add_task("Calibrating", total=sum(len(w.ids) for w in found))
    return calibrate(model, [w.ids for w in found], progress=lambda done: progress.update(task, completed=done))


def _write(args: argparse.Namespace, results: dict[Row, Result], names: dict[str, str]) -> None:
    content = {
        "arguments": {
            k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("out", "data")
        },
        "machine": {
            "device": torch.cuda.get_device_name() if str(args.device).startswith("cuda") else platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
        "windows": max((Counter(w.kind for w in result.windows) for result in results.values()), key=Counter.total),
        "measured": names,
        "rows": {row.label: result.figures() for row, result in results.items() if result.windows},
    }
    args.out.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    sys.exit(main())
