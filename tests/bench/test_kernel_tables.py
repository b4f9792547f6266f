"""The tables of the kernels and the roofline: shapes, rows, files. Times are measured on a GPU, not here."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tabulate")
pytest.importorskip("pytest_benchmark")

from bench import roofline
from bench.kernels import measure, peers, report
from kvq.kernels import timing
from kvq.scheme import INT4
from kvq.tuned import DecodeConfig

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "scheme", "batch", "context", "heads", "kv_heads", "head_dim", "time_us", "tb_per_s", "pct_read_bw", "vs_fa3_bf16",
    "vs_fa3_fp8", "rel_err",
}  # fmt: skip


def some_row(shape: measure.Shape, variant: measure.Variant, time_us: float, size: int) -> dict[str, Any]:
    found = {"fa3_bf16": 3 * time_us, "sdpa_bf16": 4 * time_us}
    return measure.row(shape, variant, time_us, size, 4e12, found, 5e-4)


def gpu_result() -> dict[str, Any]:
    uniform, ragged = measure.uniform(2, 4096), measure.Shape((2048, 6144))
    state = report.State(bandwidth=4e12)
    state.rows = [
        report.peer_row(uniform, "fa3_bf16", peers.Best(300.0, "page 64, splits 8", 900_000_000), 4e12),
        some_row(uniform, measure.DEFAULT, 100.0, 300_000_000),
        some_row(uniform, measure.VARIANTS[5], 180.0, 600_000_000),
        some_row(ragged, measure.DEFAULT, 105.0, 300_000_000),
    ]
    report.compare(state.rows)
    return report.about(state) | {"rows": state.rows}


def test_a_row_has_rate_share_of_bandwidth_and_ratio_to_each_peer() -> None:
    row = some_row(measure.MAIN, measure.DEFAULT, 150.0, 570_000_000)
    assert set(row) >= KEYS
    assert (row["batch"], row["context"], row["heads"], row["kv_heads"], row["head_dim"]) == (32, 16384, 32, 8, 128)
    assert row["tb_per_s"] == 3.8  # 570 MB in 150 us
    assert row["pct_read_bw"] == 95.0
    assert (row["vs_fa3_bf16"], row["vs_fa3_fp8"], row["vs_sdpa_bf16"]) == (3.0, None, 4.0)
    assert row["format"] == f"kvq-int4-v1#{INT4.digest}"  # as bench.accuracy prints it


def test_rows_are_compared_with_the_default_of_as_many_tokens() -> None:
    peer, default, int8, ragged = gpu_result()["rows"]
    assert (default["vs_int4"], default["vs_int4_per_byte"]) == (1.0, 1.0)
    assert (int8["vs_int4"], int8["vs_int4_per_byte"]) == (1.8, 0.9)
    assert ragged["vs_int4"] == 1.05  # over the uniform batch of the same total
    assert "vs_int4" not in peer


def test_the_shapes_are_those_of_the_speed_table() -> None:
    named = {(len(s.lens), s.context, s.heads, s.kv_heads) for s in measure.SHAPES if s.uniform}
    assert named >= {
        (32, 16384, 32, 8), (64, 8192, 32, 8), (128, 2048, 32, 8), (8, 32768, 32, 8), (1, 32768, 32, 8),
        (1, 131072, 32, 8), (64, 16384, 64, 4),
    }  # fmt: skip
    assert (len(measure.RAGGED.lens), min(measure.RAGGED.lens), max(measure.RAGGED.lens)) == (64, 256, 32768)
    assert (64, measure.RAGGED.context, 32, 8) in named  # what the ragged batch is compared with


def test_bytes_count_hot_pages_in_their_own_precision() -> None:
    shape = measure.Shape((300, 70), heads=8, kv_heads=2)
    variant = measure.Variant("recent", INT4, sink=True, recent=64)
    inputs = measure.inputs_of(shape, variant, device="cpu")
    layout = inputs.layout
    # pages of 64: 5 and 2; hot are the first ones and those with the last 64 tokens (3 and 4; 0 and 1)
    assert inputs.bytes_read == 2 * layout.page_bytes + 5 * layout.native_page_bytes
    hot = inputs.caches[0][1]
    assert hot is not None and int((hot.index >= 0).sum()) == 5


def test_caches_are_added_until_they_pass_the_rotation() -> None:
    shape = measure.Shape((130,), heads=8, kv_heads=2)
    one = measure.inputs_of(shape, measure.DEFAULT, 0, "cpu")
    size = one.caches[0][0].nbytes
    assert len(one.caches) == 1
    assert len(measure.inputs_of(shape, measure.DEFAULT, 3 * size + 1, "cpu").caches) == 4


def test_each_kernel_is_compiled_for_the_configuration_of_its_real_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def pick(layout: Any, rows: int, sequences: int, pairs: int) -> DecodeConfig:
        return DecodeConfig(programs=4 if sequences == 1 else 8)

    monkeypatch.setattr(measure, "pick", pick)
    rows = measure.rows(measure.SHAPES)
    jobs = measure.compile_jobs(rows)
    assert len(jobs) < len(rows)
    assert {variant for _, variant, _ in jobs} == {variant for _, variant in rows}
    assert {(s.heads, s.kv_heads, c.programs) for s, _, c in jobs} == {(32, 8, 8), (32, 8, 4), (64, 4, 8)}


def test_a_job_that_fails_leaves_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    timing.in_processes([(int, ("seven",)), (int, ("7",))], 2)
    assert "seven" in capfd.readouterr().err


def test_without_a_gpu_small_shapes_run_on_the_reference(tmp_path: Path) -> None:
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    command = [sys.executable, "-m", "pytest", "bench/kernels", "--benchmark-only", "--kvq-out", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-k", "ragged"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "small shapes on the torch reference" in done.stdout
    data = json.loads((tmp_path / "kernels.json").read_text(encoding="utf-8"))
    (row,) = data["rows"]
    assert set(row) >= KEYS
    assert row["rel_err"] < measure.ERROR_LIMIT and row["pct_read_bw"] is None
    with open(tmp_path / "kernels.csv", newline="", encoding="utf-8") as f:
        (line,) = csv.DictReader(f)
    assert line["scheme"] == "int4" and float(line["time_us"]) == row["time_us"]


def test_roofline_draws_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(gpu_result()), encoding="utf-8")
    assert roofline.main([str(path), "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out" / "roofline.svg").read_text(encoding="utf-8")
    (axes,) = roofline.draw(gpu_result()).axes
    assert sum(len(points.get_offsets()) for points in axes.collections) == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is not JSON"), ("[]", "has no rows"), ('{"rows": [], "read_bw_tb_per_s": null}', "without a GPU")],
)
def test_roofline_refuses_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    assert roofline.main([str(path)]) == 1
    assert reason in capsys.readouterr().err
