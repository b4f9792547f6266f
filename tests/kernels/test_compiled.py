"""What ptxas makes of the kernels for GPUs that are not here: no spills, shared memory that fits, async copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compile_check import SHARED

# At 80 % of the read bandwidth an H200 has about 4 issue slots an element of K or V.
INSTRUCTIONS_PER_ELEMENT = 3.0
# A chunk of INT4 took 10.9 and 21 barriers when it was written at half the bandwidth of an H200.
WRITE_INSTRUCTIONS, WRITE_BARRIERS = 10.0, 9


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_fit_the_gpu(capability: int) -> None:  # vLLM #36802, #46721
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_check", str(capability)],
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {"write_kernel", "gather_kernel", "decode_kernel", "merge_kernel", "schedule_kernel"} <= {
        row["kernel"] for row in rows
    }
    # Spills, and results are right: one warp and head size 256, 16 rows and 128 tokens a page, prefill. And outside its
    # loop, not yet run on a GPU: an offset over pages of 16.
    spill = ("d256-int8-page128", "g16-page128", "d64-offset-page16")
    for row in rows:
        if row["kernel"] != "prefill_kernel" and row["case"] not in spill:
            assert row["loop_spills"] == row["spill_bytes"] == row["stack_bytes"] == 0, row
        assert row["shared_bytes"] <= SHARED[capability] and row["misplaced"] == 0, row
        if row["part"] == "write a chunk" and capability == 90 and row["case"] in ("d128", "d128-hot-bf16"):
            assert row["registers"] <= 128, row  # four programs of four warps a multiprocessor
        if row["part"] == "write a chunk" and capability == 90 and row["case"] == "d128":
            assert row["instructions_per_element"] <= WRITE_INSTRUCTIONS, row
            assert row["barriers"] <= WRITE_BARRIERS, row
        if row["kernel"] == "decode_kernel":
            assert row["loop_spills"] == 0 or row["case"] == "d256-int8-page128", row
            assert row["async_16_bytes"] > row["async_narrow"], row
            assert (row["transposes"] > 0) != row["case"].startswith("g16"), row
            if "page16" in row["case"] or row["case"] in ("d128", "d128-int8", "d128-hot-bf16", "d128-page32"):
                assert row["instructions_per_element"] <= INSTRUCTIONS_PER_ELEMENT, row
