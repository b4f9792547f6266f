"""The gate without a GPU: shipped configurations compiled for Ada (sm_89) and Hopper (sm_90).

``python -m tests.kernels.test_gate 90`` prints, as JSON, what the decode kernel of each one takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kvq import tuned
from kvq.kernels.inspect import compile_launch, launches_of
from kvq.scheme import PRESETS
from tests.kernels import cases
from tests.kernels.compile_check import SHARED

INSTRUCTIONS_PER_ELEMENT = 3.0
ROOT = Path(__file__).resolve().parents[2]


def shipped(capability: int) -> dict[tuple[Any, ...], tuned.DecodeConfig]:
    """Configurations at head size 128, page 64 and a group of 4, one for each main loop they compile to."""
    found = {}
    for path in sorted(tuned.FOLDER.glob("*.json")):
        file = tuned.load(path)
        if file.capability != divmod(capability, 10):
            continue
        for shape, config in file.entries.items():
            if (shape.head_dim, shape.page_size, shape.rows) == (128, 64, 8):
                key = (shape.scheme, shape.pairs, config.num_stages, config.maxnreg)
                found.setdefault(key, config)
    return found


def main(capability: int) -> list[dict[str, Any]]:
    rows = []
    for (scheme, pairs, *_), config in shipped(capability).items():
        offset = {"mu": 3.0, "pairs": 16, "pair_scale": True} if pairs else {}
        hot = scheme == "int4" and not pairs  # as the default is used: with the first page hot
        case = cases.Case(
            scheme, PRESETS[scheme], head_dim=128, page_size=64, kv_heads=8, lens=(500, 300), hot=hot, **offset
        )
        batch = cases.make_batch(case, "cpu")
        launches = launches_of(lambda b=batch, c=config: cases.decode_kernel(b, torch.float16, c))
        launch = next(launch for launch in launches if launch.kernel.__name__ == "decode_kernel")
        made = compile_launch(launch, capability)
        code_bytes = batch.layout.k_scales  # K and V codes of a page and head
        rows.append(
            {
                "scheme": scheme,
                "pairs": pairs,
                "registers": made.registers,
                "stack_bytes": made.stack_bytes,
                "spill_bytes": made.spill_bytes,
                "shared_bytes": made.shared_bytes,
                "shared_bound": tuned.shared_bytes(config, batch.layout, case.pairs),
                "async_16_bytes": sum(n for op, n in made.loop.items() if op.startswith("LDGSTS") and ".128" in op),
                "async_16_bytes_wanted": code_bytes // (16 * 32),
                "instructions_per_element": made.loop_instructions * 32 / (2 * 64 * 128),
            }
        )
    return rows


def compiled(capability: int) -> list[dict[str, Any]]:
    """``main`` in a process without the interpreter, which the tests around this one run under."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_gate", str(capability)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_shipped_configurations_stay_within_the_budget() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip((89, 90), pool.map(compiled, (89, 90))))
    for capability, rows in results.items():
        assert {row["scheme"] for row in rows} == set(PRESETS), capability
        for row in rows:
            assert row["instructions_per_element"] <= INSTRUCTIONS_PER_ELEMENT, (capability, row)
            assert row["spill_bytes"] == 0 and row["stack_bytes"] == 0, (capability, row)
            assert row["async_16_bytes"] == row["async_16_bytes_wanted"], (capability, row)
            assert row["shared_bytes"] <= row["shared_bound"] <= SHARED[capability], (capability, row)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1])), indent=1))
