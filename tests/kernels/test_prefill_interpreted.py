"""The prefill kernel under the interpreter against kvq.reference; tests/gpu runs it compiled, at real sizes."""

from __future__ import annotations

import pytest
import torch
import triton

from kvq.kernels.prefill import PrefillConfig
from tests import tolerances
from tests.kernels import cases, prefill_cases
from tests.kernels.prefill_cases import PrefillCase

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # log2(0) is -inf on a GPU as well
    pytest.mark.usefixtures("poison"),
]


@pytest.mark.parametrize("case", prefill_cases.SMALL, ids=str)
def test_prefill_matches_float64_attention_over_the_dequantized_context(case: PrefillCase) -> None:
    batch, new = prefill_cases.make(case, "cpu")
    out, lse = prefill_cases.run_kernel(case, batch, new, torch.float32)
    want, want_lse = prefill_cases.run_reference(case, batch, new)
    assert cases.relative_error(out, want) < tolerances.DECODE[torch.float32]
    limit = tolerances.LSE_LARGE_OFFSET if case.context.mu >= 100 else tolerances.LSE
    assert (lse - want_lse).abs().max() < limit


@pytest.mark.parametrize("rows", [32, 128])
def test_result_does_not_depend_on_how_rows_are_tiled(rows: int) -> None:
    case = next(c for c in prefill_cases.SMALL if str(c) == "softcap-sinks")
    batch, new = prefill_cases.make(case, "cpu")
    config = PrefillConfig(rows, page_tokens=16, tokens=16, num_warps=4, num_stages=2)
    out, lse = prefill_cases.run_kernel(case, batch, new, torch.float16, config)
    want, want_lse = prefill_cases.run_reference(case, batch, new)
    assert cases.relative_error(out, want) < tolerances.DECODE[torch.float16]
    assert (lse - want_lse).abs().max() < tolerances.LSE
