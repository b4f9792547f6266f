"""The rows of the tables: decode on every shape and variant, and quantize-on-write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from bench.kernels import measure, peers
from bench.kernels.measure import ERROR_LIMIT, PREFILL_LIMIT, WRITE_LIMIT, Shape, Variant
from bench.kernels.report import GPU, State
from kvq.kernels.timing import write_inputs
from kvq.scheme import INT4, INT8, QuantScheme

TimeUs = Callable[[Sequence[Callable[[], Any]]], float]

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK if GPU else time.perf_counter)


def test_decode(shape: Shape, variant: Variant, state: State, time_us: TimeUs) -> None:
    found = state.peers(shape)
    inputs = measure.inputs_of(shape, variant, measure.rotation_bytes() if GPU else 0, "cuda" if GPU else "cpu")
    calls: Sequence[Callable[[], Any]]
    if GPU:
        plan = inputs.plan()
        out = torch.empty_like(inputs.query, dtype=torch.float32)
        inputs.calls(plan, out)[0]()
        calls = inputs.calls(plan, torch.empty_like(inputs.query))
    else:
        out = measure.reference_call(inputs)
        calls = [partial(measure.reference_call, inputs)]
    error = measure.decode_error(inputs, out)
    size = inputs.bytes_read if GPU else None
    state.rows.append(measure.row(shape, variant, time_us(calls), size, state.bandwidth, found, error))
    assert error < ERROR_LIMIT


@pytest.mark.skipif(not GPU, reason="times the write kernel: needs a GPU")
@pytest.mark.parametrize("scheme", [INT4, INT8], ids=lambda s: s.name)
@pytest.mark.parametrize("tokens", measure.WRITES)
def test_write(tokens: int, scheme: QuantScheme, state: State, time_us: TimeUs) -> None:
    inputs = write_inputs(measure.write_layout(scheme), tokens, least_bytes=measure.rotation_bytes())
    error = measure.write_error(inputs)
    state.writes.append(measure.write_row(scheme, inputs, time_us(inputs.calls()), state.bandwidth, error))
    assert error < WRITE_LIMIT


@pytest.mark.skipif(not GPU, reason="times prefill: needs a GPU")
@pytest.mark.parametrize("path", ["kernel", "fa3 pieces"])
@pytest.mark.parametrize("context", measure.PREFILL_CONTEXTS)
def test_prefill(context: int, path: str, state: State, benchmark: Any) -> None:
    inputs = measure.prefill_inputs(context, measure.PREFILL_TOKENS)
    attention = peers.fa3_attention if path == "fa3 pieces" else None
    try:
        found = peers.fa3_prefill(inputs)
    except ImportError as missing:
        state.missing["fa3_bf16"] = f"not installed: {missing}"
        if attention is not None:
            pytest.skip("FlashAttention 3 is not installed")
        found = {}
    error = inputs.error(inputs.call(attention))
    calls = [partial(inputs.call, attention)] * 4
    benchmark.pedantic(measure.CLOCK.run_calls, args=(calls,), rounds=5, warmup_rounds=1)
    time_us = benchmark.stats.stats.median * 1e6 / len(calls)
    state.prefills.append(measure.prefill_row(path, inputs, time_us, found, error))
    assert error < PREFILL_LIMIT
