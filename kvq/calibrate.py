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
    """Sums over tokens of keys and queries before RoPE, float64 [kv_heads, head_dim] (queries: mean of the group)."""

    key: torch.Tensor
    key_square: torch.Tensor
    query_square: torch.Tensor

    @staticmethod
    def zeros(layer: AttentionInfo) -> Moments:
        return Moments(*(torch.zeros(layer.kv_heads, layer.head_dim, dtype=torch.float64) for _ in range(3)))


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
    hooks = [hook for layer, m in zip(layers, moments, strict=True) for hook in _hooks(layer, m)]
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
    chosen = [
        _choose(layer, rope, m, counted, offset_pairs) for layer, rope, m in zip(layers, ropes, moments, strict=True)
    ]
    report = [LayerReport(i, plain, noise, t.num_pairs) for i, (t, plain, noise) in enumerate(chosen)]
    return Calibration([t for t, _, _ in chosen], report, model_digest(model), done)


def random_tokens(model: Any, length: int, count: int = 2) -> list[torch.Tensor]:
    """``count`` sequences of ``length`` ids, uniform over the vocabulary, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(_config(model).vocab_size, (length,), generator=generator) for _ in range(count)]


def _hooks(layer: AttentionInfo, moments: Moments) -> Iterator[torch.utils.hooks.RemovableHandle]:
    def heads(output: torch.Tensor) -> torch.Tensor:
        """Projected [1, tokens, heads * head_dim] or normed [1, tokens, heads, head_dim], without the first tokens."""
        return output.detach().flatten(2).unflatten(2, (-1, layer.head_dim))[0, SINKS:].double()

    def on_key(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        k = heads(output)
        moments.key += k.sum(0).cpu()
        moments.key_square += k.square().sum(0).cpu()

    def on_query(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        energy = heads(output).square().sum(0).unflatten(0, (layer.kv_heads, -1))
        moments.query_square += energy.mean(1).cpu()

    yield layer.key.register_forward_hook(on_key)
    yield layer.query.register_forward_hook(on_query)


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
    layer: AttentionInfo, rope: Rotary, moments: Moments, tokens: int, offset_pairs: int | None
) -> tuple[KeyTransform, float, float]:
    """The transform of a layer, and the predicted noise of its scores without and with it."""
    dims = rope.transform(layer, None).pair_dims
    mean = moments.key * rope.gain / tokens
    square = (moments.key_square * rope.gain**2 / tokens)[:, dims].sum(-1)  # [kv_heads, pairs], as all below
    query = (moments.query_square * rope.gain**2 / tokens)[:, dims].sum(-1)
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
