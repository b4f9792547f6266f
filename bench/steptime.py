"""Roofline time of one engine step: weights, KV bytes and prefill FLOPs of a dense transformer on one GPU.

Calibrated on one H200 with vLLM 0.26.0 and the Llama-3-8B shape; `calibration` compares the model with every measured
point. L4 and H100 take their datasheet bandwidth and FLOPs with the efficiencies found on the H200: not measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One accelerator, datasheet values: dense bf16 FLOP/s, bytes/s of memory bandwidth, bytes of memory."""

    name: str
    flops: float
    bandwidth: float
    memory: float


L4 = GPU("L4", 121e12, 300e9, 24e9)
H100 = GPU("H100", 989e12, 3.35e12, 80e9)
H200 = GPU("H200", 989e12, 4.8e12, 141e9)
GPUS = {gpu.name: gpu for gpu in (L4, H100, H200)}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder. `params` includes the input embedding, which no step reads in full; lengths are in elements."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    params: float
    vocab_params: float
    element_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in memory."""
        return self.params * self.element_bytes


LLAMA_3_8B = ModelShape("Llama-3-8B", 32, 32, 8, 128, params=8.03e9, vocab_params=0.525e9)
# The same for vLLM, as config.json.
LLAMA_3_8B_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

# Fitted by `fit` to the H200 points in MEASURED_*; as fractions of the datasheet, and seconds.
BANDWIDTH_FRACTION = 0.9155
FLOPS_FRACTION = 0.6462
ATTENTION_LATENCY = 14.8e-6  # of one layer: launch, tail of the last wave
STEP_OVERHEAD = 0.739e-3  # norms, sampling, launch of a graph


@dataclass(frozen=True)
class StepTime:
    """Seconds of one engine step of `model` on `gpu`."""

    gpu: GPU
    model: ModelShape = LLAMA_3_8B

    def __post_init__(self) -> None:
        if self.kv_pool_bytes() <= 0:
            raise ValueError(f"model {self.model.name} does not fit gpu {self.gpu.name} of {self.gpu.memory:.3g} bytes")
        bandwidth = self.gpu.bandwidth * BANDWIDTH_FRACTION
        flops = self.gpu.flops * FLOPS_FRACTION
        model = self.model
        read = (model.params - model.vocab_params) * model.element_bytes  # the head is read, the embedding is not
        set_ = object.__setattr__
        set_(self, "_weights", read / bandwidth)
        set_(self, "_token", 2 * (model.params - 2 * model.vocab_params) / flops)
        set_(self, "_kv_token", model.kv_bytes_per_token / bandwidth)
        set_(self, "_pair", 4 * model.layers * model.heads * model.head_dim / flops)
        set_(self, "_fixed", STEP_OVERHEAD + model.layers * ATTENTION_LATENCY)

    def kv_pool_bytes(self, utilization: float = 0.9, activations: float = 1.5e9) -> float:
        """Bytes left for KV blocks: vLLM's `gpu_memory_utilization` of the memory, less weights and activations."""
        return utilization * self.gpu.memory - self.model.weight_bytes - activations

    def pool_blocks(self, block_size: int) -> int:
        """KV blocks of `block_size` tokens that fit."""
        return int(self.kv_pool_bytes() // (self.model.kv_bytes_per_token * block_size))

    def step(self, tokens: int, pairs: float, kv_tokens: int) -> float:
        """Seconds of a step.

        tokens: all new tokens (prefill and decode). pairs: query-key pairs of the prefilled tokens; n new tokens after
        a context of c have n (c + n / 2). kv_tokens: cached tokens that the decoding requests and the prefill chunks
        read.
        """
        if not tokens:
            return 0.0
        linear = max(self._weights, tokens * self._token)  # type: ignore[attr-defined]
        return self._fixed + linear + pairs * self._pair + kv_tokens * self._kv_token  # type: ignore[attr-defined]

    def decode(self, batch: int) -> tuple[float, float]:
        """(seconds, seconds per cached token) of a step of `batch` requests that decode; their sum is `step`'s."""
        return self.step(batch, 0.0, 0), self._kv_token  # type: ignore[attr-defined]

    def prefill_seconds(self, new: int, context: int = 0, chunk: int = 8192) -> float:
        """Seconds to prefill `new` tokens after `context` cached ones, alone on the GPU, in chunks."""
        total = 0.0
        while new > 0:
            n = min(new, chunk)
            total += self.step(n, n * (context + n / 2), context)
            context, new = context + n, new - n
        return total


# H200, vLLM 0.26.0, CUDA graphs. Attention of one layer: (batch, context, heads, KV heads, FA3 bf16 microseconds).
# The measured 1 x 32768 point (49 us) is left out: its cache fits L2.
MEASURED_ATTENTION = (
    (8, 32768, 8, 258.0),
    (32, 4096, 8, 136.0),
    (32, 16384, 8, 498.0),
    (64, 8192, 8, 499.0),
    (64, 16384, 4, 507.0),
    (128, 2048, 8, 266.0),
)
MEASURED_TPOT = (32, 16000, 19.9e-3)  # batch, context, seconds; 15.5 ms of it attention
MEASURED_PREFILL = (16000, 35e3)  # prompt tokens, tokens/s (34 to 36 thousand)


def attention_seconds(batch: int, context: int, kv_heads: int, gpu: GPU = H200) -> float:
    """Decode attention of one layer at head size 128, bf16."""
    return 2 * batch * context * kv_heads * 128 * 2 / (gpu.bandwidth * BANDWIDTH_FRACTION) + ATTENTION_LATENCY


def calibration() -> list[tuple[str, float, float]]:
    """(what, measured seconds, modelled seconds) of every measured point."""
    rows = [
        (f"attention, 1 layer, {b} x {c}, {h} KV heads", us * 1e-6, attention_seconds(b, c, h))
        for b, c, h, us in MEASURED_ATTENTION
    ]
    model = StepTime(H200)
    batch, context, seconds = MEASURED_TPOT
    rows.append((f"decode step, {batch} x {context}", seconds, model.step(batch, 0, batch * context)))
    prompt, rate = MEASURED_PREFILL
    rows.append((f"prefill, {prompt} tokens", prompt / rate, model.prefill_seconds(prompt)))
    return rows


def fit() -> dict[str, float]:
    """Least squares (relative error) of the four constants; prints what the constants above are set to."""
    # a*x + b*1 = y with rows weighted by 1/y; 2x2 normal equations.
    rows = [(2 * b * c * h * 256 / (us * 1e-6), 1 / (us * 1e-6)) for b, c, h, us in MEASURED_ATTENTION]
    sxx, sxo, soo = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    sx, so = sum(r[0] for r in rows), sum(r[1] for r in rows)
    det = sxx * soo - sxo * sxo
    seconds_per_byte, latency = (sx * soo - so * sxo) / det, (so * sxx - sx * sxo) / det
    model, (batch, context, tpot) = LLAMA_3_8B, MEASURED_TPOT
    read = (model.params - model.vocab_params) * 2 + batch * context * model.kv_bytes_per_token
    overhead = tpot - read * seconds_per_byte - model.layers * latency
    prompt, rate = MEASURED_PREFILL
    flops = 2 * (model.params - 2 * model.vocab_params) * prompt
    flops += 4 * model.layers * model.heads * model.head_dim * prompt * prompt / 2
    chunks = -(-prompt // 8192)
    reread = (prompt - prompt % 8192) * model.kv_bytes_per_token * seconds_per_byte  # the second chunk reads the first
    seconds = prompt / rate - chunks * (overhead + model.layers * latency) - reread
    return {
        "BANDWIDTH_FRACTION": 1 / seconds_per_byte / H200.bandwidth,
        "ATTENTION_LATENCY": latency,
        "STEP_OVERHEAD": overhead,
        "FLOPS_FRACTION": flops / seconds / H200.flops,
    }
