"""Settings that every test shares: the Triton interpreter where there is no GPU, and poisoned memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is first imported. A test that compiles for a GPU it does not have starts a process without it.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    collect_ignore = ["gpu"]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty, empty_like and new_empty return: NaN in floats, all bits set in integers.

    Reading memory that was never written then changes the result of a test instead of passing by luck (0 x NaN is NaN).
    """

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poisoned(*args, **kwargs) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(torch.iinfo(tensor.dtype).max if tensor.dtype != torch.bool else True)

        return allocate_poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of recorded traces and texts beside the checkout; tests that need it are skipped without it."""
    path = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no recorded data beside the checkout")
    return path
