"""Tuned launch configurations: which one a plan gets, and which files are refused."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq import tune, tuned
from kvq.page import PAGE_SIZES, PageLayout
from kvq.plan import DecodePlan
from kvq.scheme import HEAD_DIMS, INT4, PRESETS
from kvq.tuned import DecodeConfig, ShapeClass, WriteClass, WriteConfig

H200 = tuned.load(tuned.FOLDER / "nvidia-h200.json")
L4 = tuned.load(tuned.FOLDER / "nvidia-l4.json")
SHIPPED = sorted(tuned.FOLDER.glob("*.json"))


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(tuned.ENVIRONMENT, raising=False)
    tuned._find.cache_clear()
    yield
    tuned._find.cache_clear()


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], shared: int, processors: int) -> None:
    """Make ``pick`` see a GPU that is not here."""
    properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1], multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tuned, "shared_limit", lambda device: shared)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_files_load_and_say_whether_they_were_measured(path: Path) -> None:
    file = tuned.load(path)
    assert file.measured == (path.stem == "nvidia-h200")
    assert {e.scheme for e in file.entries} == set(PRESETS)
    assert any(e.pairs for e in file.entries)


@pytest.mark.parametrize(
    ("name", "capability", "device"),
    [
        ("NVIDIA H200", (9, 0), "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "NVIDIA H100"),
        ("NVIDIA GH200 480GB", (9, 0), "NVIDIA H200"),  # by capability: the measured file
        ("NVIDIA L4", (8, 9), "NVIDIA L4"),
        ("NVIDIA L40S", (8, 9), "NVIDIA L4"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), None),
    ],
)
def test_a_file_is_found_by_name_and_then_by_capability(
    name: str, capability: tuple[int, int], device: str | None
) -> None:
    found = tuned._find(name, capability, None)
    assert (found and found.device) == device


def test_pick_takes_the_entry_of_the_shape_class(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA H200", (9, 0), 232448, 132)
    layout = PageLayout(INT4, 64, 8, 128)
    large = tuned.pick(layout, 8, 32)
    small = tuned.pick(layout, 8, 1)
    assert large == H200.entries[ShapeClass("int4", False, "large", 8, 128, 64)]
    assert small == H200.entries[ShapeClass("int4", False, "small", 8, 128, 64)]
    assert small.programs < large.programs
    offset = tuned.pick(layout, 8, 32, pairs=16)
    assert offset == H200.entries[ShapeClass("int4", True, "large", 8, 128, 64)]


KNOWN = {("small", 8, 128), ("large", 8, 128), ("large", 16, 128), ("large", 8, 256)}


def test_a_class_without_an_entry_gets_the_one_that_needs_as_many_registers() -> None:
    entries = {s: c for s, c in H200.entries.items() if s.page_size == 64 and (s.workload, s.rows, s.head_dim) in KNOWN}

    def nearest(workload: str, rows: int, head_dim: int, page_size: int) -> DecodeConfig | None:
        return tuned.nearest(entries, ShapeClass("int4", False, workload, rows, head_dim, page_size))

    assert nearest("small", 8, 256, 64) == entries[ShapeClass("int4", False, "large", 8, 256, 64)]
    assert nearest("small", 16, 128, 64) == entries[ShapeClass("int4", False, "large", 16, 128, 64)]
    assert nearest("small", 8, 64, 16) == entries[ShapeClass("int4", False, "small", 8, 128, 64)]
    assert tuned.nearest(entries, ShapeClass("mine", False, "large", 8, 128, 64)) is None


def test_the_workload_is_small_up_to_one_head_of_a_sequence_a_multiprocessor() -> None:
    assert tuned.workload_class(132, 132) == "small"
    assert tuned.workload_class(133, 132) == "large"


def test_a_gpu_without_a_file_gets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0), 166912, 108)
    assert tuned.pick(PageLayout(INT4, 64, 8, 128), 8, 8192) == DecodeConfig()


def test_a_plan_on_cpu_gets_the_default_and_a_given_one_is_kept() -> None:
    layout = PageLayout(INT4, 64, 2, 128)
    assert DecodePlan(layout, 8, 2, 128, device="cpu").config == DecodeConfig()
    config = DecodeConfig(num_stages=3)
    assert DecodePlan(layout, 8, 2, 128, device="cpu", config=config).config is config


@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from(PAGE_SIZES),
    st.sampled_from(HEAD_DIMS),
    st.sampled_from([0, 16, 32]),
    st.sampled_from([99 << 10, 163 << 10, 227 << 10]),
)
def test_what_is_picked_fits_the_shared_memory(scheme: str, page: int, dim: int, pairs: int, limit: int) -> None:
    layout = PageLayout(PRESETS[scheme], page, 8, dim)
    config = tuned.fit(DecodeConfig(num_stages=8), layout, pairs, limit)
    assert tuned.shared_bytes(config, layout, pairs) <= limit
    assert (
        config.num_stages == 8
        or tuned.shared_bytes(DecodeConfig(num_stages=config.num_stages + 1), layout, pairs) > limit
    )  # no stage less than needed


@pytest.mark.parametrize(
    ("scheme", "head_dim", "stages", "pairs", "shared"),
    [  # as compiled for sm_90 by triton 3.9
        ("int4", 128, 3, 0, 17408), ("int4", 128, 3, 16, 21760), ("int4", 128, 2, 0, 8704), ("int4", 128, 4, 0, 26112),
        ("int4", 192, 3, 0, 33792), ("int4", 256, 3, 0, 33792), ("int4", 256, 2, 0, 16896), ("int8", 128, 3, 0, 35328),
        ("int8", 128, 2, 0, 18688), ("k8v4", 128, 3, 0, 27392),
    ],
)  # fmt: skip
def test_the_bound_of_shared_memory_holds_for_what_was_compiled(
    scheme: str, head_dim: int, stages: int, pairs: int, shared: int
) -> None:
    bound = tuned.shared_bytes(DecodeConfig(num_stages=stages), PageLayout(PRESETS[scheme], 64, 8, head_dim), pairs)
    assert shared <= bound < 2.5 * shared


SM90 = tune.Gpu("NVIDIA H200", (9, 0), 227 << 10, 228 << 10, 132, 50 << 20)
SM89 = tune.Gpu("NVIDIA L4", (8, 9), 99 << 10, 100 << 10, 58, 48 << 20)


def test_candidates_that_cannot_be_resident_are_left_out() -> None:
    wide = ShapeClass("int4", False, "large", 16, 128, 64)
    found = tune.candidates(wide, SM90, False)
    assert found[0] == H200.entries[wide]  # the shipped one, whatever it is
    assert {(c.num_stages, c.programs, c.maxnreg) for c in found} >= {
        (4, 8, None),
        (3, 8, None),
        (2, 12, 168),
        (5, 4, None),
    }
    assert not any(c.programs == 12 and c.maxnreg and c.maxnreg > 168 for c in found)  # registers of a scheduler
    assert not any(c.programs == 12 and c.num_stages == 5 for c in found)  # shared memory
    large = ShapeClass("int8", False, "large", 8, 256, 128)
    assert all(tuned.shared_bytes(c, tune.layout_of(large), 0) <= 99 << 10 for c in tune.candidates(large, SM89, False))
    assert {c.programs for c in tune.candidates(large, SM89, False)} == {tuned.nearest(L4.entries, large).programs}
    assert len(tune.candidates(wide, SM90, True)) < len(found)


def test_candidates_of_writing_hold_every_way_to_read_values() -> None:
    chunk = WriteClass("int4", False, "large", 128)
    for quick in (False, True):
        found = tune.write_candidates(chunk, SM90, quick)
        assert found[0] == tuned.default_write(tune.write_layout(chunk), 8192, 0, 9)
        assert {c.values for c in found} == set(tuned.VALUES) and {c.tokens for c in found} == {64, 128}
    assert {c.tokens for c in tune.write_candidates(chunk, SM89, False)} == {16, 32}
    wide = WriteClass("int4", False, "large", 256)
    for gpu in (SM89, SM90):
        layout = tune.write_layout(wide)
        assert all(tuned.write_shared_bytes(c, layout) <= gpu.shared for c in tune.write_candidates(wide, gpu, False))


@pytest.mark.parametrize(
    ("scheme", "head_dim", "config", "shared"),
    [  # as compiled for sm_90 by triton 3.6
        ("int4", 128, WriteConfig(64, 4, "early"), 40960), ("int4", 128, WriteConfig(64, 4, "late"), 24576),
        ("int4", 128, WriteConfig(16, 4, "apart"), 12288), ("int4", 256, WriteConfig(64, 4, "early"), 98304),
        ("int4", 80, WriteConfig(64, 4, "early"), 40960), ("k8v4", 256, WriteConfig(64, 4, "apart"), 65536),
        ("int8", 128, WriteConfig(16, 2, "early"), 64),
    ],
)  # fmt: skip
def test_the_bound_of_shared_memory_holds_for_writing(
    scheme: str, head_dim: int, config: WriteConfig, shared: int
) -> None:
    layout = PageLayout(PRESETS[scheme], 64, 8, head_dim)
    assert shared <= tuned.write_shared_bytes(config, layout) <= shared + 4096


def test_every_kernel_is_compiled_once() -> None:
    shapes, kinds = list(tune.shape_classes(False)), list(tune.write_classes(False))
    jobs = tune.compile_jobs(shapes, kinds, SM90, False)
    assert len(jobs) == len({(work.__name__, *arguments) for work, arguments in jobs}) > 100
    assert len(tune.compile_jobs(list(tune.shape_classes(True)), list(tune.write_classes(True)), SM90, True)) < 60


def test_save_and_load_agree(tmp_path: Path) -> None:
    shape, config = ShapeClass("int8", False, "small", 16, 64, 16), DecodeConfig(programs=4.5, maxnreg=None)
    header = {
        "device": "GPU", "capability": [9, 0], "triton": "3.6.0", "date": "2026-11-29", "measured": True,
        "source": "a test",
    }  # fmt: skip
    kind, choice = WriteClass("int4", True, "large", 64), WriteConfig(64, 4, "apart", 96)
    entries, writes = [(shape, config, {"time_us": 1.5})], [(kind, choice, {"time_us": 2.5})]
    tuned.save(tmp_path / "gpu.json", header, entries, writes)
    file = tuned.load(tmp_path / "gpu.json")
    assert (file.entries, file.writes) == ({shape: config}, {kind: choice})
    assert tuned.rows_of(file) == (entries, writes)
    assert (file.device, file.capability, file.measured) == ("GPU", (9, 0), True)


WRITTEN = {
    "scheme": "int4", "pairs": False, "workload": "large", "head_dim": 128,
    "config": {"tokens": 64, "num_warps": 4, "values": "early", "maxnreg": None},
}  # fmt: skip


def _set(data: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("format",), 3, "format is 3; this kvq reads 4"),
        (("format",), 4.0, r"format is 4\.0; this kvq reads 4"),
        (("entries", 0, "config", "start_cost"), -1, r"config.start_cost is -1"),
        (("device",), "", "device is ''"),
        (("capability",), [9], r"capability is \[9\]"),
        (("measured",), "yes", "measured is 'yes'"),
        (("entries",), [], r"entries is \[\]"),
        (("entries", 1, "head_dim"), 100, r"entries\[1\].head_dim is 100"),
        (("entries", 0, "rows"), 4, r"entries\[0\].rows is 4"),
        (("entries", 0, "config", "num_stages"), 99, r"entries\[0\].config.num_stages is 99; expected 1..8"),
        (("entries", 0, "config", "num_warps"), 1, r"entries\[0\].config is"),
        (("entries", 0, "config", "maxnreg"), 256, r"config.maxnreg is 256"),
        (("entries", 0, "config", "prefetch"), True, r"config.prefetch is True"),
        (("entries", 0, "config", "warps"), 1, r"entries\[0\].config is"),
        (("writes",), {}, r"writes is \{\}"),
        (
            ("entries", 0, "scheme"),
            "int3",
            r"entries\[0\].scheme is 'int3'; expected one of int4, int4-sym, int8, k8v4",
        ),
        (("writes", 0, "scheme"), "int3", r"writes\[0\].scheme is 'int3'; expected one of int4, int4-sym, int8, k8v4"),
        (("writes", 0, "scheme"), ["int4"], r"writes\[0\].scheme is \['int4'\]"),
        (("writes", 0, "workload"), "huge", r"writes\[0\].workload is 'huge'"),
        (("writes", 0, "config", "tokens"), 48, r"writes\[0\].config.tokens is 48; expected one of 16, 32, 64, 128"),
        (("writes", 0, "config", "values"), "now", r"writes\[0\].config.values is 'now'"),
        (("writes", 0, "config", "num_warps"), True, r"writes\[0\].config.num_warps is True"),
        (("writes", 0, "config", "maxnreg"), 8, r"writes\[0\].config.maxnreg is 8"),
        (("writes", 1), WRITTEN, r"writes\[1\] is .*one entry a class"),
    ],
)
def test_a_bad_file_is_refused_and_names_file_and_field(
    tmp_path: Path, path: tuple[Any, ...], value: Any, reason: str
) -> None:
    data = json.loads(SHIPPED[0].read_text(encoding="utf-8"))
    if path[0] == "writes":
        data["writes"] = [copy.deepcopy(WRITTEN)] * (2 if path == ("writes", 1) else 1)
    _set(data, path, value)
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=reason) as error:
        tuned.load(bad)
    assert str(bad) in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000], ids=["empty", "list", "open", "deep"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.json"):
        tuned.load(tmp_path / "bad.json")


def test_a_refused_file_is_logged_once_and_the_shipped_one_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = tmp_path / "mine.json"
    bad.write_text('{"format": 7}', encoding="utf-8")
    monkeypatch.setenv(tuned.ENVIRONMENT, str(bad))
    gpu(monkeypatch, "NVIDIA H200", (9, 0), 232448, 132)
    with caplog.at_level(logging.WARNING, logger="kvq.tuned"):
        picked = {tuned.pick(PageLayout(INT4, 64, 8, 128), 8, 8192) for _ in range(3)}
    assert picked == {H200.entries[ShapeClass("int4", False, "large", 8, 128, 64)]}
    assert len(caplog.records) == 1 and "format is 7" in caplog.text


def test_a_file_of_another_gpu_is_foreign_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = tmp_path / "l4.json"
    given.write_text((tuned.FOLDER / "nvidia-l4.json").read_text(encoding="utf-8"), encoding="utf-8")
    with caplog.at_level(logging.WARNING, logger="kvq.tuned"):
        found = tuned._find("NVIDIA H200", (9, 0), str(given))
    assert found == H200
    assert "is for NVIDIA L4" in caplog.text
    found = tuned._find("NVIDIA L4", (8, 9), str(given))
    assert found is not None and found.path == str(given)


def test_tuning_needs_a_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 1
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "write", "--only", "wide"]], ids=" ".join)
def test_tune_writes_a_file_that_loads_with_the_fastest_configurations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Everything but the GPU: clocks that like three stages and 6 programs, for ragged batches a start cost of 2, and V
    apart, and a kernel that fails."""

    def clock(inputs: Any, config: DecodeConfig, replays: int = 7) -> float:
        if config.programs == 12:
            raise RuntimeError("out of resources")
        ragged = inputs.batch.shortest is not None and config.start_cost != 2
        return 100.0 + 10 * ((config.num_stages != 3) + (config.programs != 6) + ragged)

    def write_clock(inputs: Any, config: WriteConfig, replays: int = 7) -> float:
        return 20.0 + (config.values != "apart") + (config.tokens != 64)

    gpu(monkeypatch, "NVIDIA Test", (9, 0), 227 << 10, 132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    properties = SimpleNamespace(
        name="NVIDIA Test", major=9, minor=0, multi_processor_count=132, L2_cache_size=1 << 20,
        shared_memory_per_multiprocessor=228 << 10,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tune, "in_processes", lambda jobs, processes: None)
    monkeypatch.setattr(tune, "inputs_of", lambda *args: SimpleNamespace(bytes_read=10**8, batch=args[1]))
    monkeypatch.setattr(tune, "writes_of", lambda *args: SimpleNamespace(bytes_moved=10**8))
    monkeypatch.setattr(tune, "time_us", clock)
    monkeypatch.setattr(tune, "write_us", write_clock)
    path = tmp_path / "test.json"
    assert tune.main([*arguments, "--out", str(path)]) == 0
    file = tuned.load(path)
    assert (file.device, file.capability, file.measured) == ("NVIDIA Test", (9, 0), True)
    assert set(file.entries) >= set(H200.entries)  # those that were not measured are the shipped ones
    wide = ShapeClass("int4", False, "large", 16, 128, 64)
    measured = [wide] if "--only" in arguments else list(tune.shape_classes(True))
    for shape, config in file.entries.items():
        if shape not in measured:
            assert config == H200.entries[shape]
        else:
            assert (config.num_stages, config.programs) == (3, 6)
            assert (config.start_cost == 2) == (shape.workload == "large")
    chunk = file.writes[WriteClass("int4", False, "large", 128)]
    assert (chunk.tokens, chunk.values) == (64, "apart")
    row = next(row for row in json.loads(path.read_text())["entries"] if row["rows"] == 16 and row["scheme"] == "int4")
    names = ("64 x 16384 heads 64/4", "64 x 256 to 32768 heads 64/4")
    assert row["shipped"] == dict(zip(names, (110.0, 120.0))) and row["tuned"] == dict.fromkeys(names, 100.0)
    assert "64 x 16384 heads 64/4: shipped 110.0 us, tuned 100.0 us" in capsys.readouterr().out


def test_writing_picks_the_tuned_configuration_of_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu(monkeypatch, "NVIDIA H200", (9, 0), 232448, 132)
    layout = PageLayout(INT4, 64, 8, 128)
    default = tuned.pick_write(layout, 8192)
    assert default == tuned.default_write(layout, 8192, 0, 9) and default.tokens == 64
    entries, _ = tuned.rows_of(H200)
    header = {
        "device": "NVIDIA H200", "capability": [9, 0], "triton": "3.6.0", "date": "2026-11-30", "measured": True,
        "source": "a test",
    }  # fmt: skip
    chosen, large = WriteConfig(128, 8, "late"), WriteConfig(128, 8, "early")
    kinds = [WriteClass("int4", False, "large", dim) for dim in (128, 256)]
    path = tmp_path / "mine.json"
    tuned.save(path, header, entries, [(kinds[0], chosen, {}), (kinds[1], large, {})])
    monkeypatch.setenv(tuned.ENVIRONMENT, str(path))
    assert tuned.pick_write(layout, 8192) == chosen
    assert tuned.pick_write(layout, 1024) == tuned.default_write(layout, 1024, 0, 9)
    assert tuned.pick_write(layout, 8192, pairs=16) == tuned.default_write(layout, 8192, 16, 9)
    monkeypatch.setattr(tuned, "shared_limit", lambda device: 99 << 10)
    assert tuned.pick_write(PageLayout(INT4, 64, 8, 256), 8192).tokens == 64  # what does not fit is not used


@pytest.mark.parametrize("scheme", sorted(PRESETS))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_default_writes_fit_every_gpu(scheme: str, head_dim: int) -> None:
    layout = PageLayout(PRESETS[scheme], 64, 8, head_dim)
    for major, limit in ((8, 99 << 10), (9, 227 << 10), (12, 99 << 10)):
        for tokens in (1, 1024, 1025, 8192):
            for pairs in (0, 16):
                assert tuned.write_shared_bytes(tuned.default_write(layout, tokens, pairs, major), layout) <= limit
