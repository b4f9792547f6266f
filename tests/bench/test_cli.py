"""The kvq command line: commands, sizes, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import agents_demo, cli, doctor, size, soak
from kvq import tuned
from kvq.page import PageLayout
from kvq.scheme import INT4

LLAMA_3_8B = size.SHAPES["llama-3-8b"]


def test_every_command_is_offered_and_describes_itself(capsys):
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name} " in overview
        with pytest.raises(SystemExit) as stop:
            cli.main([name, "--help"])
        assert stop.value.code == 0
        assert capsys.readouterr().out.startswith("usage: ")


def test_unknown_command_is_refused(capsys):
    assert cli.main(["compress"]) == 2
    assert "no command 'compress'" in capsys.readouterr().err


def test_bad_input_ends_with_one_line_and_status_2():
    command = [sys.executable, "-m", "bench", "size", "no-such-model", "--memory", "24GiB"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1 and "no-such-model" in ran.stderr and "llama-3-8b" in ran.stderr


@pytest.mark.parametrize(
    ("text", "value"), [("24GiB", 24 * 2**30), ("24G", 24 * 10**9), ("1.5 tb", 1500 * 10**9), ("500MiB", 500 * 2**20)]
)
def test_memory_units(text, value):
    assert size.parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "9" * 400 + "GiB", "0GiB", "-1GiB", "24 gigs", "GiB", "24i"])
def test_memory_that_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="memory is"):
        size.parse_bytes(text)


def test_capacity_without_native_pages_is_the_budget_over_the_bits():
    bf16, int8, k8v4, int4 = size.capacities(LLAMA_3_8B, 24 * 2**30, sequences=0)
    assert bf16.tokens == 24 * 2**30 // (32 * 8 * 128 * 2 * 2)  # 128 KiB a token
    for row, bits in ((int8, 8.125), (k8v4, 6.1875), (int4, 4.25)):
        assert row.effective_bits == pytest.approx(bits)
        assert row.ratio == pytest.approx(16 / bits, rel=1e-3)


def test_capacity_fits_the_budget_and_one_page_more_does_not():
    budget, sequences, page_size = 2 * 2**30, 3, 32
    layout = PageLayout(INT4, page_size, 8, 128)
    row = size.capacities(LLAMA_3_8B, budget, sequences=sequences, recent_tokens=100, page_size=page_size)[-1]
    # 100 tokens touch up to 5 pages of 32 (99 / 32 rounded up, one more), plus the first page.
    assert row.recent_bytes == sequences * 6 * layout.native_page_bytes * 32
    pages = row.tokens // page_size
    assert pages * layout.page_bytes * 32 + row.recent_bytes <= budget
    assert (pages + 1) * layout.page_bytes * 32 + row.recent_bytes > budget


def test_ranks_split_heads_and_copy_them_when_there_are_more_ranks():
    assert [size.heads_per_rank(8, tp) for tp in (1, 2, 8, 16)] == [8, 4, 1, 1]
    for tp in (0, 3, 12):
        with pytest.raises(ValueError, match="tp is"):
            size.heads_per_rank(8, tp)


def test_native_pages_beyond_the_budget_are_refused():
    with pytest.raises(ValueError, match="fewer --sequences"):
        size.capacities(LLAMA_3_8B, 2**30, sequences=64, recent_tokens=4096)


def write_config(folder: Path, **values) -> str:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512} | values
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_shape_is_read_from_config_json(tmp_path):
    assert size.read_shape(write_config(tmp_path)) == size.Shape(4, 8, 64)
    assert size.read_shape(write_config(tmp_path, num_key_value_heads=2, head_dim=128)) == size.Shape(4, 2, 128)
    # Qwen2.5 names a window that it does not use.
    assert size.read_shape(write_config(tmp_path, sliding_window=4096, use_sliding_window=False)).layers == 4


@pytest.mark.parametrize(
    "values",
    [{"sliding_window": 4096}, {"layer_types": ["full_attention", "sliding_attention"]}, {"kv_lora_rank": 512}],
)
def test_models_whose_cache_is_not_full_attention_are_refused(tmp_path, values):
    with pytest.raises(ValueError, match=r"config\.json"):
        size.read_shape(write_config(tmp_path, **values))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds []"),
        ('"llama"', "holds 'llama'"),
        ('{"text_config": 5}', "holds 5"),
        ('{"text_config": null}', "no 'num_attention_heads'"),
        ('{"layer_types": 5}', "layer_types is 5"),
        ('{"layer_types": [["full_attention"]]}', "layer_types is"),
        ('{"num_attention_heads": 0}', "num_attention_heads is 0"),
        ('{"num_attention_heads": "8"}', "num_attention_heads is '8'"),
        ('{"num_attention_heads": 8, "num_hidden_layers": 2, "hidden_size": 4}', "head_dim is 0"),
        ('{"num_attention_heads": 8, "head_dim": 64, "num_hidden_layers": true}', "num_hidden_layers is True"),
    ],
)
def test_a_config_that_is_none_is_refused_by_name(tmp_path, capsys, text, named):
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["size", str(tmp_path), "--memory", "24GiB"]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "config.json") in error and named in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        (soak, ["--minutes", "-1"]),
        (soak, ["--minutes", "inf"]),
        (soak, ["--blocks", "4"]),
        (agents_demo, ["--policy", "best"]),
        (agents_demo, ["--pause", "0"]),
        (size, ["x", "--memory", "1G", "--tp", "0"]),
    ],
)
def test_arguments_are_refused_before_anything_starts(module, argv, capsys):
    with pytest.raises(SystemExit) as stop:
        module.main(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {argv[-2]}: " in error and argv[-1] in error


def test_agents_refuses_a_log_that_cannot_be_before_the_engine_starts(capsys):
    assert cli.main(["agents", "--events", "/missing/events.jsonl"]) == 2
    assert "--events is /missing/events.jsonl" in capsys.readouterr().err


def test_size_prints_every_format(capsys):
    assert cli.main(["size", "llama-3-8b", "--memory", "24GiB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["scheme"] for row in rows] == ["bf16", "int8", "k8v4", "int4"]
    assert rows[3]["tokens"] > 3 * rows[0]["tokens"]


def test_doctor_finds_a_package_that_shadows_ours(tmp_path, monkeypatch):
    # doctor's own root decides what is ours: seen from another root, all of ours are strangers.
    states = {finding.subject: finding for finding in doctor.check_shadowing(tmp_path)}
    assert states["integration"].state == "wrong"
    assert "shadowed by" in states["integration"].detail
    monkeypatch.setattr(doctor, "packages_distributions", lambda: {"bench": ["frappe-bench", "kvq-toolkit"]})
    states = {finding.subject: finding for finding in doctor.check_shadowing()}
    assert states["bench"].detail == "also installed by frappe-bench"
    assert states["integration"].state == "ok"


H200 = ("NVIDIA H200", (9, 0))


@pytest.mark.parametrize(
    ("file", "gpus", "states", "said"),
    [
        (None, [], [], ""),
        (None, [H200], ["ok"], "nvidia-h200.json"),
        (None, [("Some GPU", (8, 6))], ["absent"], "Some GPU"),
        ("nvidia-h200.json", [], ["ok"], "no GPU"),
        ("nvidia-h200.json", [H200], ["ok"], "KVQ_TUNED="),
        ("nvidia-l4.json", [H200], ["wrong", "ok"], "NVIDIA L4"),
        ("missing.json", [], ["wrong"], "missing.json"),
        ("missing.json", [H200], ["wrong", "ok"], "missing.json"),
    ],
)
def test_doctor_says_which_tuned_file_is_used_and_why_one_is_not(monkeypatch, file, gpus, states, said):
    if file is None:
        monkeypatch.delenv("KVQ_TUNED", raising=False)
    else:
        monkeypatch.setenv("KVQ_TUNED", str(tuned.FOLDER / file))
    findings = list(doctor.check_tuned(gpus))
    assert [finding.state for finding in findings] == states
    assert said in "".join(finding.detail for finding in findings)
