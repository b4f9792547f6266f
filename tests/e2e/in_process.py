"""A real engine whose core is in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def engine_in_process(**arguments: Any) -> Iterator[Any]:
    """vllm.LLM with these arguments, in float32 on the CPU; shut down at the end."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, os.environ.get(name, value))
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()  # of engines that other tests had here
        llm = LLM(dtype="float32", enforce_eager=True, max_num_seqs=4, seed=0, **arguments)
        if type(llm.llm_engine.engine_core).__name__ != "InprocClient":
            pytest.skip("another test of this process has fixed the engine core to a process of its own")
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
