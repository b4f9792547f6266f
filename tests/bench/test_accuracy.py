from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import accuracy, texts
from bench.accuracy import FORMATS, PAGE, Harness, Row, measure, mixed_attention, native_start
from kvq import reference
from kvq.calibrate import calibrate, load_calibration, transforms_from_model
from kvq.scheme import INT4
from kvq.transform import measured_name

transformers = pytest.importorskip("transformers")


def rows(tokens: int, heads: int, dim: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", ["0", "40", "turns"])
def test_each_position_reads_native_keys_in_its_window_and_stored_ones_before(window: str) -> None:
    length, kv_heads = 300, 2
    q, k, v = rows(length, 6), rows(length, kv_heads, seed=1), rows(length, kv_heads, seed=2)
    stored_k, stored_v = rows(length, kv_heads, seed=3), rows(length, kv_heads, seed=4)
    start = native_start(window, length, [0, 70, 130, 200, 290])
    by_head = [x.transpose(0, 1) for x in (q, k, v, stored_k, stored_v)]
    out = mixed_attention(*by_head, start, scale=0.125).transpose(0, 1)
    for t in (0, 39, 69, 70, 131, 199, 200, 299):
        first = t + 1 if start is None else max(0, int(start[t]))
        key = torch.cat([stored_k[:first], k[first:]])[: t + 1]
        value = torch.cat([stored_v[:first], v[first:]])[: t + 1]
        expected, _ = reference.attention(q[t : t + 1], key, value, scale=0.125)
        assert torch.allclose(out[t], expected[0], atol=1e-5), t


def test_window_of_two_turns_starts_at_the_page_of_the_previous_turn() -> None:
    starts = [0, 10, 3 * PAGE + 5, 5 * PAGE]
    start = native_start("turns", 6 * PAGE, starts)
    assert start is not None
    assert start[[0, 9, 3 * PAGE + 4]].tolist() == [0, 0, 0]
    assert start[3 * PAGE + 5] == 0  # the turn at 10 starts in the first page
    assert start[[5 * PAGE, 6 * PAGE - 1]].tolist() == [3 * PAGE, 3 * PAGE]
    tokens = native_start("128", 300, [])
    assert tokens is not None and tokens[200] == 73  # 73..200 are 128 tokens


def test_lloyd_max_levels_have_the_distortion_of_the_published_quantizer() -> None:
    """16 levels for a normal variable: mean squared error 0.009497, outermost level 2.733 (Max 1960, table I)."""
    levels = accuracy.lloyd_max()
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    error = (levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)] - x).square().mean()
    assert levels[-1].item() == pytest.approx(2.733, abs=2e-3)
    assert error.item() == pytest.approx(0.009497, rel=0.01)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_back_close_values(name: str) -> None:
    x = rows(2 * PAGE, 3)
    bound = 0.011 if FORMATS[name].bits(64) < 6 else 1e-4
    for kind in (FORMATS[name].key, FORMATS[name].value):
        got = accuracy.store(kind, x, None, torch.arange(len(x)))
        assert 0 < (got - x).square().mean() / x.square().mean() < (bound if name != "k8v4" else 0.011)


def test_bits_count_scales_and_zeros() -> None:
    expected = {"int4": 4.25, "int4-sym": 4.125, "int8": 8.125, "channel": 4.375, "integer-zero": 4.15625, "bf16": 16}
    assert {name: FORMATS[name].bits(128) for name in expected} == expected


def tiny_model(bias: float) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=53,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2  # predictions that depend on the context
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.zero_()
            layer.self_attn.k_proj.bias[5::64] = bias
    return model


def window(length: int = 400) -> texts.Window:
    ids = torch.randint(0, 53, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    return texts.Window("agent", tuple(ids), (0, 100, 250, 330))


def kl(model: Any, wanted: list[Row], offset: int = 0) -> list[float]:
    harness = Harness(model, position_offset=offset)
    harness.transforms = {
        "bias": transforms_from_model(model),
        "calibrated": calibrate(model, [window(512).ids]).transforms,
    }
    results = measure(harness, wanted, [window()])
    return [results[row].figures()["kl"] for row in wanted]


def test_nothing_changes_where_everything_is_native() -> None:
    model = tiny_model(bias=0.0)
    everything, nothing = kl(model, [Row("int4-plain", "400", 0), Row("int4-plain", "0", 0)])
    assert everything < 1e-7 < 1e-4 < nothing
    assert kl(model, [Row("int4-plain", "0", 400)])[0] < 1e-7


def test_unquantized_harness_predicts_what_the_model_predicts() -> None:
    model, ids = tiny_model(bias=3.0), torch.tensor(window().ids)
    with torch.no_grad():
        expected = model(ids[None]).logits[0, accuracy.SCORE_FROM : -1].log_softmax(-1)
    assert torch.allclose(Harness(model).log_probs(ids, None), expected, atol=1e-4)


def test_key_bias_ruins_plain_int4_and_the_offset_repairs_it_at_any_position() -> None:
    model = tiny_model(bias=150.0)
    wanted = [Row(name, "0", 4) for name in ("int4-hadamard", "int4", "int4-calibrated")]
    for offset in (0, 7000):
        rotation_only, bias, calibrated = kl(model, wanted, offset)
        assert max(bias, calibrated) < rotation_only / 10


def test_turn_rows_count_agent_sessions_only() -> None:
    harness = Harness(tiny_model(bias=0.0))
    turns, tokens = Row("int4-plain", "turns", 4), Row("int4-plain", "0", 4)
    plain_text = texts.Window("wikitext", window().ids)
    results = measure(harness, [turns, tokens], [plain_text, window()])
    assert [w.kind for w in results[turns].windows] == ["agent"]
    assert [w.kind for w in results[tokens].windows] == ["wikitext", "agent"]


def test_kinds_of_text_keep_their_weight_however_many_windows_they_have() -> None:
    result = accuracy.Result({"wikitext": 6.0, "agent": 4.0})
    for kind, kl in [("wikitext", 1.0), ("wikitext", 3.0), ("wikitext", 2.0), ("agent", 6.0), ("agent", 8.0)]:
        result.windows.append(accuracy.WindowResult(kind, kl, loss=kl / 100, reference_loss=0.0, top1=0.5))
    figures = result.figures()
    assert figures["kl"] == pytest.approx(0.6 * 2 + 0.4 * 7)
    assert figures["kl_error"] == pytest.approx((0.36 * 1 / 3 + 0.16 * 2 / 2) ** 0.5)
    assert figures["perplexity_change"] == pytest.approx(math.expm1(0.04))
    result.windows.pop()  # one window of a kind says nothing about how much they differ
    assert result.figures()["kl_error"] is None


def test_figures_carry_the_name_of_what_was_measured() -> None:
    """Kernel tables print the same name for the same scheme and transforms."""
    plain, biased = (transforms_from_model(tiny_model(bias)) for bias in (0.0, 3.0))
    name = FORMATS["int4"].name
    assert name({"bias": plain}) == measured_name(INT4) == f"kvq-int4-v1#{INT4.digest}"
    assert name({"bias": biased}).startswith(f"{measured_name(INT4)}+")
    assert name({"bias": biased}) != name({"bias": transforms_from_model(tiny_model(4.0))})
    assert FORMATS["channel"].name({}) == "-"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--schemes", "int4,int5"], "--schemes has 'int5'; allowed: bf16, int8"),
        (["--windows", "0,-1"], "--windows has '-1'; allowed: a number of tokens, or turns"),
        (["--first", "4,page"], "--first is '4,page'; allowed: numbers of tokens"),
    ],
)
def test_bad_options_are_named(option: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        accuracy.parse(option)
    assert message in capsys.readouterr().err


def test_packaged_model_meets_the_bars_on_the_shipped_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars of the default format (docs/accuracy.md), here on one shorter window and calibrated on another."""
    shipped = texts.shipped
    monkeypatch.setattr(texts, "shipped", lambda encode, purpose, length: list(shipped(encode, purpose, 512))[:1])
    out = tmp_path / "out.json"
    options = ["--schemes", "int8,int4-random,int4-calibrated", "--every", "4", "--data", str(tmp_path / "absent")]
    assert accuracy.main([*options, "--out", str(out)]) == 0
    figures = {name: row["kl"] for name, row in json.loads(out.read_text())["rows"].items()}
    assert figures["int8/0/4"] < 0.002
    assert figures["int4-random/0/4"] < 0.03
    assert figures["int4-calibrated/0/4"] < 0.015
    assert all(math.isfinite(kl) and kl > 0 for kl in figures.values())
    printed = capsys.readouterr().out
    assert "smollm2-135m: 1 shipped windows of 512 tokens" in printed and "4.250" in printed


def test_calibrate_command_writes_a_file_that_the_model_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import calibrate_cli

    model = tiny_model(bias=150.0)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("x" * 400)
    monkeypatch.setattr(calibrate_cli, "load_model", lambda path, device: (model, lambda text: list(window(512).ids)))
    out = tmp_path / "transforms.safetensors"
    argv = [str(tmp_path / "model"), "-o", str(out), "--text", str(tmp_path / "text"), "--pairs", "3"]
    assert calibrate_cli.main(argv) == 0
    loaded = load_calibration(out, model)
    assert loaded.hurt == [0, 1] and [t.num_pairs for t in loaded.transforms] == [3, 3]
    printed = capsys.readouterr().out
    assert loaded.transforms[0].digest in printed and printed.count("plain INT4 hurts") == 2
