from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvq import reference
from kvq.calibrate import (
    SCALE_RANGE,
    SINKS,
    Calibration,
    attention_layers,
    calibrate,
    load_calibration,
    model_digest,
    rotary,
    save_calibration,
    score_noise,
    transforms_from_model,
)
from kvq.scheme import INT4

transformers = pytest.importorskip("transformers")
COMMON = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}


def tiny(kind: str, seed: int = 0, **options: Any) -> Any:
    """A random model of two layers of a transformers architecture, with random biases where it has any."""
    torch.manual_seed(seed)
    architecture = getattr(transformers, f"{kind}ForCausalLM")
    model = architecture(architecture.config_class(**{**COMMON, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.normal_()
    return model


def tokens(count: int = 600, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 97, (count,), generator=torch.Generator().manual_seed(seed))


def rope(theta: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


ROTATIONS = {
    "llama": ("Llama", rope()),
    "qwen2": ("Qwen2", rope(1e6)),
    "linear": ("Llama", rope(rope_type="linear", factor=4.0)),
    "llama3": (
        "Llama",
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=512,
        ),
    ),
    "yarn, which also scales": ("Qwen2", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)),
    "interleaved pairs": ("Cohere", rope()),
    "part of the head": ("StableLm", {"hidden_size": 256, **rope(partial_rotary_factor=0.25)}),
    "own frequencies a layer type": (
        "Gemma3",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
}


@pytest.mark.parametrize(("kind", "options"), ROTATIONS.values(), ids=ROTATIONS)
def test_offset_turns_as_the_models_own_rope_does(kind: str, options: dict[str, Any]) -> None:
    """The stored offset R(pos) mu is what the model's attention makes of the key mu at that position."""
    model = tiny(kind, **options)
    positions = torch.tensor([0, 1, 7, 500, 4000])
    for layer in attention_layers(model):
        mu = torch.randn(layer.kv_heads, layer.head_dim, generator=torch.Generator().manual_seed(3))
        rope = rotary(model, layer.module)
        transform = rope.transform(layer, mu * rope.gain)
        got = reference.offset(transform, positions)

        code = importlib.import_module(type(layer.module).__module__)
        args = [getattr(layer.module, "layer_type", None)] if kind == "Gemma3" else []
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions[None], *args)
        key = mu[None, :, None].expand(-1, -1, len(positions), -1)
        turned = key[..., : cos.shape[-1]]
        turned = torch.cat([code.apply_rotary_pos_emb(turned, turned, cos, sin)[1], key[..., cos.shape[-1] :]], -1)
        assert torch.allclose(got, turned[0].transpose(0, 1), atol=2e-3)  # the model's angles are float32


def test_layers_without_positions_keep_a_constant_offset() -> None:
    model = tiny("SmolLM3", no_rope_layers=[1, 0], **rope())
    first, second = (rotary(model, layer.module) for layer in attention_layers(model))
    assert first.inv_freq.any() and not second.inv_freq.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (rope(mrope_section=[8, 12, 12]), "M-RoPE"),
        (rope(rope_type="dynamic", factor=2.0), "rope_type is 'dynamic'; allowed for an offset"),
    ],
)
def test_rotations_by_something_else_than_the_index_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        transforms_from_model(tiny("Qwen2", **options))  # has biases, so it needs offsets
    with pytest.raises(ValueError, match=message):
        calibrate(tiny("Llama", **options), [tokens()])
    assert all(t.mu is None for t in transforms_from_model(tiny("Llama", **options)))  # none is needed


def test_unknown_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no module with q_proj and k_proj"):
        attention_layers(torch.nn.Linear(2, 2))
    model = tiny("Llama", **rope())
    model.model.layers[1].self_attn.key_layernorm = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn has key_layernorm"):
        attention_layers(model)


def test_without_text_the_offset_is_the_bias_of_the_key_projection() -> None:
    model = tiny("Qwen2", **rope())
    for layer, transform in zip(model.model.layers, transforms_from_model(model), strict=True):
        assert transform.mu is not None and transform.pair_scale is None
        assert torch.equal(transform.mu.flatten(), layer.self_attn.k_proj.bias)
    assert all(t.mu is None for t in transforms_from_model(tiny("Llama", **rope())))
    # Behind a norm the bias is not an offset of the key.
    assert all(t.mu is None for t in transforms_from_model(tiny("Qwen3", attention_bias=True, **rope())))


@pytest.mark.parametrize(("kind", "options"), [("Qwen2", rope()), ("Qwen3", rope()), ("Cohere", rope())])
def test_calibrated_offset_is_the_mean_key_weighted_by_what_its_scores_do_to_the_output(
    kind: str, options: dict[str, Any]
) -> None:
    """The weight of a key, as the gradient of the layer's output by the scores gives it, in a plain loop."""
    model, ids = tiny(kind, **options), tokens(300)
    transform = calibrate(model, [ids], offset_pairs=32).transforms[0]
    attention = model.model.layers[0].self_attn
    seen: dict[str, torch.Tensor] = {}
    sources = {
        "q": getattr(attention, "q_norm", attention.q_proj),
        "k": getattr(attention, "k_norm", attention.k_proj),
        "v": attention.v_proj,
    }
    for name, source in sources.items():
        source.register_forward_hook(
            lambda _m, _a, out, name=name: seen.update({name: out.detach().reshape(300, -1, 64)})
        )
    with torch.no_grad():
        model(ids[None])
    layer = attention_layers(model)[0]
    own = rotary(model, attention).transform(layer, None)
    angle = torch.arange(300.0, dtype=torch.float64)[:, None] * own.pair_freq
    a, b = own.pair_dims.T

    def turn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[..., a] = x[..., a] * angle.cos()[:, None] - x[..., b] * angle.sin()[:, None]
        out[..., b] = x[..., b] * angle.cos()[:, None] + x[..., a] * angle.sin()[:, None]
        return out

    q, k, v = (seen[n].double() for n in "qkv")
    q, turned = turn(q), turn(k)
    expected = torch.zeros(2, 64, dtype=torch.float64)
    for kv_head in range(2):
        weight = torch.zeros(300, dtype=torch.float64)
        for head in (2 * kv_head, 2 * kv_head + 1):
            columns = attention.o_proj.weight.detach().double()[:, head * 64 : head * 64 + 64]
            for t in range(300):
                p = (turned[: t + 1, kv_head] @ q[t, head] / 8).softmax(0)
                away = v[: t + 1, kv_head] - p @ v[: t + 1, kv_head]
                weight[: t + 1] += p.square() * (away @ columns.T).square().sum(-1)
        weight[:SINKS] = 0
        expected[kv_head] = weight @ k[:, kv_head] / weight.sum()
    assert transform.mu is not None
    assert torch.allclose(transform.mu.double(), expected, atol=2e-4)


def test_offset_pairs_are_the_ones_that_remove_most_noise() -> None:
    model = tiny("Qwen2", **rope())
    bias = model.model.layers[0].self_attn.k_proj.bias
    large = torch.tensor([5, 11, 30])
    with torch.no_grad():
        bias.zero_()
        bias.view(2, 64)[1, large + 32] = 40.0  # the second half of the dims, so that pairs are what counts
    transform = calibrate(model, [tokens()], offset_pairs=3).transforms[0]
    carried = (transform.pair_mu != 0).any(-1)
    assert carried.sum(1).tolist() == [3, 3]
    assert carried[1].nonzero().flatten().tolist() == large.tolist()
    assert all(t.num_pairs == 0 and t.mu is None for t in calibrate(model, [tokens()], offset_pairs=0).transforms)


def test_by_default_a_layer_carries_the_offset_on_as_few_pairs_as_it_needs() -> None:
    model = tiny("Qwen2", num_hidden_layers=3, **rope())
    for layer, count in zip(model.model.layers, (0, 5, 20), strict=True):
        bias = torch.zeros(2, 64)
        bias[1, :count] = 50.0
        layer.self_attn.k_proj.bias.data = bias.flatten()
        layer.self_attn.v_proj.bias.data.zero_()  # it would shift what later layers see, and so their keys
    calibration = calibrate(model, [tokens()])
    assert [t.num_pairs for t in calibration.transforms] == [0, 16, 32]
    everywhere = calibrate(model, [tokens()], offset_pairs=32)
    for chosen, most in zip(calibration.report, everywhere.report, strict=True):
        assert most.noise <= chosen.noise <= 1.2 * most.noise


def test_pair_scale_makes_the_error_of_scores_smaller_than_no_scale() -> None:
    """Real error of q.k with queries and keys whose pairs differ in size, against the same without the scale."""
    model = tiny("Llama", **rope())
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight *= torch.logspace(1, -1, 32).repeat(2).repeat(4)[:, None]
        attention.k_proj.weight *= torch.logspace(-1, 1, 32).repeat(2).repeat(2)[:, None]
    transform = calibrate(model, [tokens()]).transforms[0]
    layer = attention_layers(model)[0]
    captured: dict[str, torch.Tensor] = {}
    for name, source in (("q", layer.query), ("k", layer.key)):
        source.register_forward_hook(lambda _m, _a, out, name=name: captured.update({name: out.detach()[0]}))
    with torch.no_grad():
        model(tokens(seed=2)[None])
    q, k = captured["q"].view(-1, 4, 64)[:, :2], captured["k"].view(-1, 2, 64)  # the queries of the first kv head
    positions = torch.zeros(len(k), dtype=torch.int64)
    errors = []
    for t in (transform, replace(transform, mu=None, pair_scale=None)):
        codes, scale, zero = reference.quantize_rows(reference.encode(k, INT4.key, t, positions), INT4.key)
        stored = reference.dequantize_rows(codes, scale, zero, INT4.key, torch.float32)
        error = reference.decode(stored, INT4.key, t, positions) - k
        errors.append(torch.einsum("thd,sd->ths", q, error[:, 0]).square().mean().item())
    assert errors[0] < errors[1] / 10


def test_predicted_noise_agrees_with_the_error_of_real_scores() -> None:
    g = torch.Generator().manual_seed(0)
    size = torch.logspace(-0.5, 0.5, 32)
    k = torch.randn(512, 1, 2, 32, generator=g) * size
    q = torch.randn(256, 2, 32, generator=g) * size.flip(0)
    k, q = k.flatten(-2), q.flatten(-2)
    codes, scale, zero = reference.quantize_rows(reference.encode(k, INT4.key), INT4.key)
    error = reference.decode(reference.dequantize_rows(codes, scale, zero, INT4.key, torch.float32), INT4.key) - k
    measured = ((q @ error[:, 0].T) / 8).std().item()
    moments = [x.square().mean(0).view(2, 32).sum(0)[None] for x in (k[:, 0], q)]
    assert score_noise(*moments, torch.ones(1, 32), 64) == pytest.approx(measured, rel=0.25)


def test_report_names_the_layers_that_plain_int4_would_hurt() -> None:
    model = tiny("Qwen2", **rope())
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.k_proj.bias)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[7] = 200.0  # as in Qwen2.5
    calibration = calibrate(model, [tokens()])
    assert calibration.hurt == [1]
    plain, calibrated = calibration.report[1].plain_noise, calibration.report[1].noise
    assert calibrated < plain / 20


def test_scales_of_dead_pairs_stay_finite_and_bounded() -> None:
    model = tiny("Llama", **rope())
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight[:32] = 0
        attention.k_proj.weight[32:48] = 0
    scale = calibrate(model, [tokens()]).transforms[0].pair_scale
    assert scale is not None
    assert (scale <= SCALE_RANGE * (1 + 1e-5)).all() and (scale >= 1 / SCALE_RANGE / (1 + 1e-5)).all()


def test_texts_are_checked_and_hooks_removed_whatever_happens() -> None:
    model = tiny("Llama", **rope())
    with pytest.raises(ValueError, match="texts holds a string but tokenizer is None"):
        calibrate(model, [tokens(), "text"])
    with pytest.raises(ValueError, match="texts have 96 tokens besides the first 4 of each window; needed: 256"):
        calibrate(model, [tokens(100), [1, 2, 3, 4]])
    assert not any(m._forward_hooks for m in model.modules())


def test_strings_go_through_the_tokenizer_and_progress_counts_tokens() -> None:
    model, done = tiny("Llama", **rope()), []

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 97 for c in text]}

    text = "the quick brown fox " * 30
    by_text = calibrate(model, [text], tokenizer, window=256, progress=done.append)
    by_ids = calibrate(model, [tokenizer(text)["input_ids"]], window=256)
    assert done == [256, 512, 600] and by_text.tokens == 600
    assert [t.digest for t in by_text.transforms] == [t.digest for t in by_ids.transforms]


def test_without_texts_random_tokens_repair_a_biased_layer() -> None:
    model = tiny("Qwen2", **rope())
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias[70] = 200.0
    first, again = calibrate(model), calibrate(model)
    assert [t.digest for t in first.transforms] == [t.digest for t in again.transforms]
    assert first.hurt == [0] and first.report[0].noise < first.report[0].plain_noise / 20
    mu = first.transforms[0].mu
    assert mu is not None and mu[1, 6].item() == pytest.approx(200.0, abs=1.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration]:
    calibration = calibrate(tiny("Qwen2", **rope()), [tokens()])
    path = tmp_path_factory.mktemp("calibration") / "qwen.safetensors"
    save_calibration(calibration, path)
    return path, calibration


def test_file_gives_back_the_same_transforms_and_report(saved: tuple[Path, Calibration]) -> None:
    path, calibration = saved
    loaded = load_calibration(path, tiny("Qwen2", **rope()))
    assert [t.digest for t in loaded.transforms] == [t.digest for t in calibration.transforms]
    assert (loaded.report, loaded.tokens, loaded.model_digest) == (
        calibration.report,
        calibration.tokens,
        calibration.model_digest,
    )
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_file_of_another_model_is_refused(saved: tuple[Path, Calibration]) -> None:
    for other in (tiny("Qwen2", seed=1, **rope()), tiny("Qwen2", **rope(5e5))):
        with pytest.raises(ValueError, match="was made from model"):
            load_calibration(saved[0], other)


def test_model_is_the_same_in_every_float_type() -> None:
    model = tiny("Qwen2", **rope()).bfloat16()
    digest = model_digest(model)
    assert model_digest(model.float()) == digest
    assert model_digest(model.half()) == digest


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": "pt"}, "is not a calibration: its format is 'pt'"),
        ({"version": "2"}, "has version 2; this kvq reads"),
    ],
)
def test_other_files_and_versions_are_refused(
    saved: tuple[Path, Calibration], tmp_path: Path, metadata: dict[str, str], message: str
) -> None:
    from safetensors import safe_open

    with safe_open(saved[0], "pt") as file:
        content = {**file.metadata(), **metadata}
    save_file(load_file(saved[0]), tmp_path / "other.safetensors", content)
    with pytest.raises(ValueError, match=message):
        load_calibration(tmp_path / "other.safetensors")


def test_altered_tensors_are_refused(saved: tuple[Path, Calibration], tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(saved[0], "pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved[0])
    tensors["layers.1.pair_scale"][0, 0] *= 2
    save_file(tensors, tmp_path / "altered.safetensors", metadata)
    with pytest.raises(ValueError, match="digest"):
        load_calibration(tmp_path / "altered.safetensors")
