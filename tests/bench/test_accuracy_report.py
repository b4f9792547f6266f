from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import accuracy_report


def run(kl: float, change: float) -> dict[str, Any]:
    row = {"kl": kl, "kl_error": 0.0002, "perplexity_change": change, "perplexity_error": 0.001, "top1": 0.96}
    return {
        "arguments": {
            "model": "smollm2-135m", "offset": 7000, "texts": "evaluation", "limit": None, "more": 12, "every": 1,
            "windows": ["128", "turns"], "first": [4], "schemes": ["int4-calibrated", "channel"], "calibration": None,
        },
        "machine": {"device": "NVIDIA H200", "cores": 16, "torch": "2.11.0"},
        "windows": {"wikitext": 72, "agent": 27},
        "measured": {"int4-calibrated": "kvq-int4-v1#0123abcd+97161209217d", "channel": "-"},
        "rows": {"int4-calibrated/128/4": row, "channel/turns/4": row},
    }  # fmt: skip


def test_report_prints_command_table_and_which_targets_are_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"good": run(0.003, 0.004), "bad": run(0.005, 0.0064)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert accuracy_report.main([str(tmp_path / "good.json"), str(tmp_path / "bad.json")]) == 0
    printed = capsys.readouterr().out
    assert (
        "python -m bench.accuracy --model smollm2-135m --offset 7000 --more 12 --windows 128,turns "
        "--schemes int4-calibrated,channel\n" in printed
    )
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "| INT4, calibrated | 4.500 / 4.250 | +0.40 ± 0.10 % | 0.0030 ± 0.0002 | 96.0 % | | | |" in lines
    assert "| INT4, calibrated, window 128: KL at most 0.0040 | 0.0030 | 0.0050 (missed) |" in lines
    assert "| INT4, calibrated, window 128: perplexity at most +0.50 % | +0.40 % | +0.64 % (missed) |" in lines
    assert "Measured: INT4, calibrated: kvq-int4-v1#0123abcd+97161209217d." in lines
