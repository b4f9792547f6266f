"""The step-time model against its measurements and against hand calculation."""

from __future__ import annotations

import pytest

from bench import steptime
from bench.steptime import GPUS, LLAMA_3_8B, ModelShape, StepTime, calibration, fit


def test_every_measured_point_is_met_within_5_percent():
    for what, measured, model in calibration():
        assert model == pytest.approx(measured, rel=0.05), what


def test_the_constants_are_those_of_the_fit():
    for name, value in fit().items():
        assert getattr(steptime, name) == pytest.approx(value, rel=0.01), name


def test_llama_keeps_128_kib_a_token():
    assert LLAMA_3_8B.kv_bytes_per_token == 131072


def test_a_decode_step_reads_weights_and_cache():
    model = StepTime(GPUS["H200"])
    bandwidth = 4.8e12 * steptime.BANDWIDTH_FRACTION
    fixed = steptime.STEP_OVERHEAD + 32 * steptime.ATTENTION_LATENCY
    assert model.step(1, 0, 0) == pytest.approx(fixed + (8.03e9 - 0.525e9) * 2 / bandwidth)
    assert model.step(8, 0, 80_000) - model.step(8, 0, 0) == pytest.approx(80_000 * 131072 / bandwidth)


def test_the_two_parts_of_a_decode_step_are_the_step_to_the_last_bit():
    model = StepTime(GPUS["H100"])
    for batch, kv_tokens in ((1, 1), (7, 123_457), (256, 1_000_003)):
        fixed, per_token = model.decode(batch)
        assert fixed + kv_tokens * per_token == model.step(batch, 0.0, kv_tokens)


def test_prefill_grows_with_its_context_and_with_the_square_of_its_length():
    model = StepTime(GPUS["H100"])
    assert model.prefill_seconds(1000, context=30_000) > model.prefill_seconds(1000)
    assert model.prefill_seconds(16_000) > 2 * model.prefill_seconds(8_000)


def test_an_empty_step_takes_no_time():
    assert StepTime(GPUS["L4"]).step(0, 0, 0) == 0.0


def test_slower_gpus_take_longer_and_hold_less():
    steps = [StepTime(GPUS[name]) for name in ("L4", "H100", "H200")]
    assert sorted((s.step(32, 0, 100_000) for s in steps), reverse=True) == [s.step(32, 0, 100_000) for s in steps]
    assert sorted(s.pool_blocks(64) for s in steps) == [s.pool_blocks(64) for s in steps]


def test_a_model_that_does_not_fit_is_refused_by_name():
    big = ModelShape("big", 80, 64, 8, 128, params=70e9, vocab_params=1e9)
    with pytest.raises(ValueError, match="big does not fit gpu L4"):
        StepTime(GPUS["L4"], big)
