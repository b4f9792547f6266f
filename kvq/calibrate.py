"""KeyTransforms of a model: from its weights alone, or calibrated; and the file that holds them.

Models are duck-typed, as in transformers: attention modules with ``q_proj`` and ``k_proj`` (and ``q_norm`` and
``k_norm`` where there are norms), a ``config``, and a rotary embedding with ``inv_freq``. Nothing here can make
attention wrong, only less or more precise: what is taken off a key is put back when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from kvq.transform import KeyTransform

FILE_FORMAT = "kvq-calibration"
FILE_VERSION = 1
SINKS = 4  # first tokens: their keys are unlike all others and stay native, so they do not count
MIN_TOKENS = 256
QUERY_BLOCK = 256  # queries whose attention is held at a time
SCALE_RANGE = 64.0  # pair scales lie within 1/64..64 of their geometric mean, so that scaled queries stay in fp16 range
MORE_NOISE = 1.2  # allowed by leaving pairs without an offset, relative to an offset on all of them
NOISY = 1.0  # nats; see LayerReport.plain_noise


@dataclass(frozen=True)
class LayerReport:
    """What INT4 does to the attention scores of a layer: the predicted error of its worst head.

    ``plain_noise`` and ``noise``: standard deviation, in nats, of the error that quantizing the keys adds to a score,
    with the Hadamard rotation alone and with the layer's transform. ``pairs``: rotary pairs that carry an offset.
    """

    layer: int
    plain_noise: float
    noise: float
    pairs: int

    @property
    def hurt(self) -> bool:
        """Whether plain INT4 would hurt this layer: scores off by a nat change probabilities by a factor e."""
        return self.plain_noise > NOISY


@dataclass(frozen=True)
class Calibration:
    """``transforms`` and ``report``: one each a layer. ``model_digest`` binds them to the model (``model_digest``)."""

    transforms: list[KeyTransform]
    report: list[LayerReport]
    model_digest: str
    tokens: int

    @property
    def hurt(self) -> list[int]:
        """Layers that plain INT4 would hurt."""
        return [r.layer for r in self.report if r.hurt]


# ---- what a model looks like


@dataclass(frozen=True)
class AttentionInfo:
    """One attention layer: the modules that give queries and keys just before RoPE, and their shape."""

    query: nn.Module
    key: nn.Module
    kv_heads: int
    head_dim: int
    weight: torch.Tensor  # of k_proj
    bias: torch.Tensor | None  # of k_proj, where it is the keys' offset before RoPE
    value: nn.Module | None  # v_proj, where there is one
    output: torch.Tensor | None  # weight of o_proj, where there is one
    module: nn.Module


def attention_layers(model: Any) -> list[AttentionInfo]:
    """The attention layers of a decoder in order. Raises ValueError where there is none, or one of an unknown kind."""
    layers = []
    for name, module in _decoder(model).named_modules():
        if not (hasattr(module, "q_proj") and hasattr(module, "k_proj")):
            continue
        unknown = [n for n in ("q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm") if hasattr(module, n)]
        if unknown:
            raise ValueError(f"{name} has {unknown[0]}; only norms called q_norm and k_norm, before RoPE, are known")
        head_dim = getattr(module, "head_dim", None) or _config(model).head_dim
        bias = getattr(module.k_proj, "bias", None)
        normed = isinstance(getattr(module, "k_norm", None), nn.Module)
        kv_heads, rest = divmod(module.k_proj.weight.shape[0], head_dim)
        if rest:
            raise ValueError(f"{name}.k_proj has {module.k_proj.weight.shape[0]} rows; not a multiple of {head_dim}")
        layers.append(
            AttentionInfo(
                query=module.q_norm if normed else module.q_proj,
                key=module.k_norm if normed else module.k_proj,
                kv_heads=kv_heads,
                head_dim=head_dim,
                weight=module.k_proj.weight,
                bias=None if bias is None or normed else bias.detach().float().view(kv_heads, head_dim),
                value=getattr(module, "v_proj", None),
                output=getattr(getattr(module, "o_proj", None), "weight", None),
                module=module,
            )
        )
    if not layers:
        raise ValueError(f"model {type(model).__name__} has no module with q_proj and k_proj")
    return layers


def _decoder(model: Any) -> Any:
    """The text decoder, so that the vision tower of a multimodal model is left alone."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@dataclass(frozen=True)
class Rotary:
    """How RoPE turns a layer's heads.

    ``inv_freq``: float64 [rotary_dim / 2]. ``interleaved``: which dims form a pair (see KeyTransform). ``gain``: what
    cos and sin are multiplied by, 1 but for YaRN.
    """

    inv_freq: torch.Tensor
    interleaved: bool
    gain: float

    def transform(
        self, layer: AttentionInfo, mu: torch.Tensor | None, pair_scale: torch.Tensor | None = None
    ) -> KeyTransform:
        """The layer's KeyTransform; ``mu`` has been multiplied by ``gain``."""
        return KeyTransform(
            layer.kv_heads,
            layer.head_dim,
            mu=mu,
            pair_scale=pair_scale,
            inv_freq=self.inv_freq,
            rotary_dim=2 * self.inv_freq.numel(),
            interleaved=self.interleaved,
        )

    def turn(self, layer: AttentionInfo, x: torch.Tensor) -> torch.Tensor:
        """``x`` [heads, tokens, head_dim] float32 after RoPE, the first token at position 0."""
        a, b = self.transform(layer, None).pair_dims.T.to(x.device)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * self.inv_freq
        count = self.inv_freq.numel()
        cos, sin = ((f(angle) * self.gain).to(x.device, x.dtype) for f in (torch.cos, torch.sin))
        out = x.clone()
        left, right = x[..., a[:count]], x[..., b[:count]]
        out[..., a[:count]], out[..., b[:count]] = left * cos - right * sin, right * cos + left * sin
        return out


def _rope_parameters(model: Any) -> dict[str, Any]:
    config = _config(model)
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def rotary(model: Any, attention: nn.Module) -> Rotary:
    """How an attention layer rotates, if it is by position times a fixed frequency.

    Raises ValueError for anything else: M-RoPE (positions are not the index), frequencies that depend on the sequence
    length, and pairings of dims that cannot be recognised.
    """
    layer_type = getattr(attention, "layer_type", None)
    parameters = _rope_parameters(model)
    if layer_type in parameters:
        parameters = parameters[layer_type]
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if "mrope_section" in parameters or kind == "mrope":
        raise ValueError("the model has M-RoPE: its positions are not the index, so keys cannot carry an offset")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rope_type is {kind!r}; allowed for an offset: default, linear, llama3, yarn")
    embedding = _rotary_embedding(model, attention)
    prefix = f"{layer_type}_" if hasattr(embedding, f"{layer_type}_inv_freq") else ""
    inv_freq = getattr(embedding, f"{prefix}inv_freq").detach().double().cpu()
    if not getattr(attention, "use_rope", True):  # layers without positions, as in SmolLM3
        inv_freq = torch.zeros_like(inv_freq)
    gain = float(getattr(embedding, f"{prefix}attention_scaling", 1.0))
    return Rotary(inv_freq, _interleaved(attention), gain)


def _rotary_embedding(model: Any, attention: nn.Module) -> nn.Module:
    own = getattr(attention, "rotary_emb", None)
    if own is not None:
        return own
    found = [m for name, m in _decoder(model).named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if len(found) != 1:
        raise ValueError(f"model {type(model).__name__} has {len(found)} modules called rotary_emb; expected one")
    return found[0]


def _interleaved(attention: nn.Module) -> bool:
    """Which dims form a pair, asked of the model's own ``rotate_half``: (j, j + n/2) or, interleaved, (2j, 2j + 1)."""
    rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    if rotate_half is not None:
        turned = rotate_half(torch.arange(1.0, 5.0).view(1, 1, 1, 4)).flatten().tolist()
        for layout, interleaved in (([-3.0, -4.0, 1.0, 2.0], False), ([-2.0, 1.0, -4.0, 3.0], True)):
            if turned == layout:
                return interleaved
    raise ValueError(f"{type(attention).__name__}: cannot tell which dims RoPE pairs; an offset is refused")


def transforms_from_model(model: Any) -> list[KeyTransform]:
    """One transform a layer from the weights alone: the bias of k_proj is the offset, without one there is none.

    Where keys pass a norm after the projection the bias is not their offset and is not used. Raises ValueError where a
    layer has a bias but rotates by something else than position times a fixed frequency (see ``rotary``).
    """
    transforms = []
    for layer in attention_layers(model):
        if layer.bias is None or not layer.bias.any():
            transforms.append(KeyTransform(layer.kv_heads, layer.head_dim))
        else:
            rope = rotary(model, layer.module)
            transforms.append(rope.transform(layer, layer.bias * rope.gain))
    return transforms


# ---- calibration


@dataclass
class Moments:
    """Weighted means of keys and queries before RoPE, float64 [kv_heads, head_dim] (queries: over a group's heads).

    A pair of a query t and a key j weighs as much as an error of their score changes the layer's output, to first
    order: p_tj^2 |W_o (v_j - o_t)|^2, where p are the attention probabilities and o the output of attention. The
    first ``SINKS`` keys have no weight.
    """

    key: torch.Tensor
    key_square: torch.Tensor
    query_square: torch.Tensor
    weight: torch.Tensor  # [kv_heads, 1], the sum of the weights

    @staticmethod
    def zeros(layer: AttentionInfo) -> Moments:
        return Moments(*(torch.zeros(layer.kv_heads, d, dtype=torch.float64) for d in (*[layer.head_dim] * 3, 1)))

    def add(self, query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor) -> None:
        """Queries [kv_heads, group, n, head_dim], keys [kv_heads, tokens, head_dim], [kv_heads, group, n, tokens]."""
        of_key, of_query = weight.sum((1, 2)).double()[:, None], weight.sum(-1).flatten(1).double()[:, None]
        key, query = key.double(), query.flatten(1, 2).double()
        self.key += (of_key @ key)[:, 0].cpu()
        self.key_square += (of_key @ key.square())[:, 0].cpu()
        self.query_square += (of_query @ query.square())[:, 0].cpu()
        self.weight += of_key.sum(-1).cpu()

    def means(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean key, mean squares of keys and of queries; heads without any weight have zeros."""
        weight = self.weight.clamp(min=1e-300)
        return self.key / weight, self.key_square / weight, self.query_square / weight


def output_weights(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gram: torch.Tensor, scale: float, first: int
) -> torch.Tensor:
    """What an error of each score does to a layer's output (``Moments``), [kv_heads, group, n, tokens].

    query [kv_heads, group, n, head_dim] of the tokens from index ``first`` on, key and value [kv_heads, tokens, .],
    after RoPE; gram [kv_heads, group, d, d] of o_proj's columns. Attention is taken to be causal and no more: sliding
    windows, soft caps and learned sinks change the weights, not what is measured.
    """
    scores = torch.einsum("hgtd,hjd->hgtj", query, key) * scale
    own = torch.arange(first, first + query.shape[2], device=query.device)[:, None]
    future = torch.arange(key.shape[1], device=query.device)[None] > own
    probs = scores.masked_fill(future, -math.inf).softmax(-1)
    out = torch.einsum("hgtj,hjd->hgtd", probs, value)
    seen = torch.einsum("hgde,hje->hgjd", gram, value)
    distance = torch.einsum("hgjd,hjd->hgj", seen, value)[:, :, None] - 2 * torch.einsum("hgjd,hgtd->hgtj", seen, out)
    distance += torch.einsum("hgtd,hgde,hgte->hgt", out, gram, out)[..., None]
    weight = probs.square() * distance.clamp(min=0)
    weight[..., :SINKS] = 0
    return weight


def calibrate(
    model: Any,
    texts: Iterable[str | Sequence[int] | torch.Tensor] | None = None,
    tokenizer: Callable[[str], Any] | None = None,
    *,
    offset_pairs: int | None = None,
    window: int = 1024,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Measure a model's keys and queries on texts, or on random tokens, and choose the transform of every layer.

    Every mean is weighted by what an error of a score does to the layer's output (``Moments``).
    Per head: ``mu`` is the mean key before RoPE. It is kept on the ``offset_pairs`` rotary pairs where it removes most
    noise (default: the fewest of 0, 16, 32, ... that leave a layer at most 1.2 times the noise of an offset on all
    pairs; decode pays for them). The scale of a pair is s = (E k'^2 / E q^2)^(1/4), k' being the key less its
    offset: with the rotation, the squared error of a score is proportional to sum(k'^2 / s^2) * sum(q^2 s^2), which
    this s makes least.

    Args:
        model: a causal language model (see the module's docstring), on any device.
        texts: strings, or token ids. Longer ones are cut into windows of ``window`` tokens. None: random token ids, the
            same at every call; less exact than text, far better than nothing (docs/accuracy.md).
        tokenizer: for strings; returns ``input_ids`` for a string (called with no other argument).
        progress: called with the number of tokens done after every window.

    Raises ValueError for texts of fewer than 256 tokens, strings without a tokenizer, and models whose rotary embedding
    allows no offset (see ``rotary``).
    """
    layers = attention_layers(model)
    ropes = [rotary(model, layer.module) for layer in layers]
    moments = [Moments.zeros(layer) for layer in layers]
    hooks = [hook for parts in zip(layers, ropes, moments, strict=True) for hook in _hooks(*parts)]
    counted = done = 0
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            for ids in _token_windows(random_tokens(model, window) if texts is None else texts, tokenizer, window):
                _decoder(model)(input_ids=ids[None].to(device), use_cache=False)
                counted += len(ids) - SINKS
                done += len(ids)
                if progress is not None:
                    progress(done)
    finally:
        for hook in hooks:
            hook.remove()
    if counted < MIN_TOKENS:
        raise ValueError(f"texts have {counted} tokens besides the first {SINKS} of each window; needed: {MIN_TOKENS}")
    chosen = [_choose(layer, rope, m, offset_pairs) for layer, rope, m in zip(layers, ropes, moments, strict=True)]
    report = [LayerReport(i, plain, noise, t.num_pairs) for i, (t, plain, noise) in enumerate(chosen)]
    return Calibration([t for t, _, _ in chosen], report, model_digest(model), done)


def random_tokens(model: Any, length: int, count: int = 2) -> list[torch.Tensor]:
    """``count`` sequences of ``length`` ids, uniform over the vocabulary, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(_config(model).vocab_size, (length,), generator=generator) for _ in range(count)]


def _hooks(layer: AttentionInfo, rope: Rotary, moments: Moments) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Hooks that note a layer's queries, keys and values, and add them to ``moments`` once its attention is done."""
    seen: dict[str, torch.Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            # projected [1, tokens, heads * head_dim] or normed [1, tokens, heads, head_dim]; heads of values may differ
            heads = layer.kv_heads if name == "value" else output[0, 0].numel() // layer.head_dim
            seen[name] = output.detach()[0].flatten(1).unflatten(1, (heads, -1)).transpose(0, 1).float()

        return hook

    def finish(_module: nn.Module, _args: Any, _output: Any) -> None:
        if "query" in seen and "key" in seen:  # layers that read another layer's keys have none
            _add(layer, rope, moments, seen["query"], seen["key"], seen.get("value", seen["key"]))
        seen.clear()

    yield layer.key.register_forward_hook(note("key"))
    yield layer.query.register_forward_hook(note("query"))
    if layer.value is not None:
        yield layer.value.register_forward_hook(note("value"))
    yield layer.module.register_forward_hook(finish)


def _add(
    layer: AttentionInfo, rope: Rotary, moments: Moments, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Add one text: queries [heads, tokens, head_dim], keys and values [kv_heads, tokens, .] before RoPE."""
    group = query.shape[0] // layer.kv_heads
    scale = getattr(layer.module, "scaling", None) or layer.head_dim**-0.5
    width = value.shape[-1]
    if layer.output is not None and layer.output.shape[1] == query.shape[0] * width:
        columns = layer.output.detach().float().view(-1, layer.kv_heads, group, width)
        gram = torch.einsum("xhgd,xhge->hgde", columns, columns)
    else:
        gram = torch.eye(width, device=value.device).expand(layer.kv_heads, group, width, width)
    turned_query, turned_key = rope.turn(layer, query), rope.turn(layer, key)
    grouped = query.unflatten(0, (layer.kv_heads, group))
    turned_query = turned_query.unflatten(0, (layer.kv_heads, group))
    for first in range(0, key.shape[1], QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, key.shape[1])
        weight = output_weights(
            turned_query[:, :, first:last], turned_key[:, :last], value[:, :last], gram, scale, first
        )
        moments.add(grouped[:, :, first:last], key[:, :last], weight)


def _token_windows(
    texts: Iterable[str | Sequence[int] | torch.Tensor], tokenizer: Callable[[str], Any] | None, window: int
) -> Iterator[torch.Tensor]:
    """Token ids int64 [<= window], windows that hold sinks only left out."""
    for text in texts:
        if isinstance(text, str):
            if tokenizer is None:
                raise ValueError("texts holds a string but tokenizer is None; give a tokenizer or token ids")
            text = tokenizer(text)["input_ids"]
        ids = torch.as_tensor(text, dtype=torch.long).flatten()
        yield from (part for part in ids.split(window) if len(part) > SINKS)


def _choose(
    layer: AttentionInfo, rope: Rotary, moments: Moments, offset_pairs: int | None
) -> tuple[KeyTransform, float, float]:
    """The transform of a layer, and the predicted noise of its scores without and with it."""
    dims = rope.transform(layer, None).pair_dims
    mean, square, query = moments.means()
    mean = mean * rope.gain
    square, query = (x[:, dims].sum(-1) * rope.gain**2 for x in (square, query))  # [kv_heads, pairs], as all below
    variance = square - mean.square()[:, dims].sum(-1)
    tiny = 1e-9 * (1 + square.amax())
    square, variance, query = square.clamp(min=tiny), variance.clamp(min=tiny), query.clamp(min=tiny)
    order = (query.sqrt() * (square.sqrt() - variance.sqrt())).argsort(1, descending=True)

    def with_pairs(count: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Which pairs carry the offset, the pair scale, and the noise."""
        carry = torch.zeros_like(square, dtype=torch.bool).scatter_(1, order[:, :count], True)
        left = torch.where(carry, variance, square)
        log_scale = (left / query).log() / 4
        log_scale = log_scale - log_scale.mean(1, keepdim=True)
        scale = log_scale.clamp(-math.log(SCALE_RANGE), math.log(SCALE_RANGE)).exp()
        return carry, scale, score_noise(left, query, scale, layer.head_dim)

    pairs = layer.head_dim // 2
    if offset_pairs is None:
        enough = MORE_NOISE * with_pairs(pairs)[2]
        counts = [0, *(16 << i for i in range(pairs.bit_length()) if 16 << i < pairs), pairs]
        offset_pairs = next(n for n in counts if with_pairs(n)[2] <= enough)
    carry, scale, noise = with_pairs(offset_pairs)
    mu = torch.zeros_like(mean)
    mu[:, dims.flatten()] = (mean[:, dims] * carry[..., None]).flatten(1)
    transform = rope.transform(layer, mu.float() if offset_pairs else None, scale.float())
    return transform, score_noise(square, query, torch.ones_like(scale), layer.head_dim), noise


def score_noise(key: torch.Tensor, query: torch.Tensor, scale: torch.Tensor, head_dim: int) -> float:
    """Predicted standard deviation, in nats, of the error of q.k / sqrt(head_dim) in the worst head with INT4 keys.

    ``key``, ``query``: second moments of what is quantized and of the query, ``scale``: the pair scale, all
    [kv_heads, pairs], summed over a pair. After the rotation the elements of a row are close to normal with variance
    sum(k^2 / s^2) / head_dim; their range is about 5 standard deviations, cut into 15 steps of uniform error.
    """
    step2 = 25 / 15**2 * (key / scale.square()).sum(-1) / head_dim
    return float((step2 / 12 * (query * scale.square()).sum(-1) / head_dim).amax().sqrt())


# ---- the file


def model_digest(model: Any) -> str:
    """16 hex digits that name a model: rotary settings, and the weights of k_proj rounded to float16.

    The same for the same checkpoint loaded in float32, bfloat16 or float16, as long as nothing is lost in float16.
    """
    h = hashlib.sha256()
    rope = [_rope_parameters(model), getattr(_config(model), "rope_theta", None)]
    h.update(json.dumps(rope, sort_keys=True, default=str).encode())
    for layer in attention_layers(model):
        h.update(f"{layer.kv_heads},{layer.head_dim}".encode())
        h.update(layer.weight.detach().cpu().half().numpy().tobytes())
    return h.hexdigest()[:16]


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write one safetensors file: the tensors of all layers; format, version, model and report as metadata."""
    tensors: dict[str, torch.Tensor] = {}
    for i, transform in enumerate(calibration.transforms):
        tensors |= transform.tensors(f"layers.{i}.")
    metadata = {
        "format": FILE_FORMAT,
        "version": str(FILE_VERSION),
        "model": calibration.model_digest,
        "tokens": str(calibration.tokens),
        "transforms": json.dumps([t.metadata() for t in calibration.transforms]),
        "report": json.dumps([asdict(r) for r in calibration.report]),
    }
    partial = Path(f"{os.fspath(path)}.partial")
    save_file(tensors, partial, metadata)
    partial.replace(path)


def load_calibration(path: str | os.PathLike[str], model: Any | None = None) -> Calibration:
    """Read a file of ``save_calibration``.

    With ``model`` given, raises ValueError where the file was made from another one. Also raises it for a file of
    another format or version, and where a transform is not what its digest says.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FILE_FORMAT:
            raise ValueError(f"{path} is not a calibration: its format is {metadata.get('format')!r}")
        if metadata["version"] != str(FILE_VERSION):
            raise ValueError(f"{path} has version {metadata['version']}; this kvq reads version {FILE_VERSION}")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    if model is not None and (digest := model_digest(model)) != metadata["model"]:
        raise ValueError(f"{path} was made from model {metadata['model']}; this one is {digest}")
    transforms = [
        KeyTransform.from_tensors(tensors, fields, f"layers.{i}.")
        for i, fields in enumerate(json.loads(metadata["transforms"]))
    ]
    report = [LayerReport(**fields) for fields in json.loads(metadata["report"])]
    return Calibration(transforms, report, metadata["model"], int(metadata["tokens"]))
