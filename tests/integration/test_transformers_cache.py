"""KVQCache against transformers' own cache: exact where it promises exactness, quantized once elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from integration.transformers_cache import KVQCache  # noqa: E402
from kvq import INT4, KeyTransform, PageLayout  # noqa: E402

VOCAB = 100


def tiny(kind: str, **changes):
    """A random model of two layers with 4 query heads, 2 kv heads of 64 and, for qwen2, a large bias of k_proj."""
    shape = {
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
    } | changes
    torch.manual_seed(7)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)).eval()
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.normal_(0, 30)
    return model


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, cache, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Forward passes of the given lengths; their logits together."""
    parts = torch.split(ids, lengths, dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


def stored(cache: KVQCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values as attention would see them, without adding a token."""
    cache = copy.deepcopy(cache)
    heads, head_dim = cache.layers[layer].layout.kv_heads, cache.layers[layer].layout.head_dim
    batch = len(cache.sequences.tables)
    nothing = torch.zeros(batch, heads, 0, head_dim)
    return cache.layers[layer].update(nothing, nothing)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("scheme", ["int4", "int8", "k8v4"])
def test_all_turns_recent_gives_the_same_bits_as_dynamic_cache(kind, scheme):
    model, ids, lengths = tiny(kind), tokens(2, 150), [70, 1, 29, 1, 49]
    ours = feed(model, KVQCache.from_model(model, scheme, "all"), ids, lengths)
    assert torch.equal(ours, feed(model, transformers.DynamicCache(), ids, lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recent_turns_and_first_page_are_exact_and_older_pages_quantized_once(dtype):
    model, ids = tiny("llama").to(dtype), tokens(1, 300)
    cache, plain = KVQCache.from_model(model, "int4", 2, page_size=32), transformers.DynamicCache()
    for start, stop in ((0, 100), (100, 150), (150, 210), (210, 300)):
        cache.start_turn()
        # The same inputs to both caches, so that layer 0 sees the same keys.
        feed(model, cache, ids[:, start:stop], [stop - start])
        feed(model, plain, ids[:, start:stop], [stop - start])
    keys, values = stored(cache, 0)
    truth_k, truth_v = plain.layers[0].keys, plain.layers[0].values
    exact = (keys == truth_k).all(-1).all(1)[0] & (values == truth_v).all(-1).all(1)[0]
    # The last two turns start at 150; the page of 32 that holds it starts at 128. The first page ends at 32.
    expected = torch.zeros(300, dtype=torch.bool)
    expected[:32] = expected[128:] = True
    assert torch.equal(exact, expected)
    assert 0 < (keys - truth_k).float().norm() / truth_k.float().norm() < 0.1

    # Two more turns: what was quantized stays as it is, bit for bit.
    old = keys[:, :, 32:128].clone()
    pages = cache.layers[0].pages[1:4].clone()
    feed(model, cache, tokens(1, 80, seed=1), [40, 40])
    cache.start_turn()
    feed(model, cache, tokens(1, 40, seed=2), [40])
    assert torch.equal(stored(cache, 0)[0][:, :, 32:128], old)
    assert torch.equal(cache.layers[0].pages[1:4], pages)


def test_a_page_that_grows_old_reads_as_if_it_had_never_been_native():
    model, ids = tiny("llama"), tokens(1, 256)
    windowed = KVQCache.from_model(model, "int4", 1)
    for part in torch.split(ids, 64, dim=1):
        windowed.start_turn()
        feed(model, windowed, part, [64])
    never = KVQCache.from_model(model, "int4", 0)
    # Layer 0 gets the same keys whatever the cache holds.
    for part in torch.split(ids, 64, dim=1):
        feed(model, never, part, [64])
    for ours, theirs in zip(stored(windowed, 0), stored(never, 0)):
        assert torch.equal(ours[:, :, :192], theirs[:, :, :192])
        assert not torch.equal(ours[:, :, 192:], theirs[:, :, 192:])


def test_turns_start_with_a_prompt_that_follows_generated_tokens():
    model = tiny("llama")
    cache = KVQCache.from_model(model, "int4", 2)
    history = tokens(1, 20)
    for _ in range(3):
        history = model.generate(history, past_key_values=cache, max_new_tokens=5, do_sample=False, eos_token_id=None)
        history = torch.cat([history, tokens(1, 10)], 1)
    # generate leaves its last token out of the cache; the next prompt brings it.
    assert cache.sequences.turn_starts == [0, 24, 39]


def test_prompt_in_chunks_is_one_turn():
    model = tiny("llama")
    cache = KVQCache.from_model(model)
    feed(model, cache, tokens(1, 90), [30, 30, 30])
    assert cache.sequences.turn_starts == [0]
    cache.start_turn()
    cache.start_turn()
    assert cache.sequences.turn_starts == [0, 90]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("recent_turns", [0, 2])
def test_left_padded_batch_generates_what_each_row_does_alone(kind, recent_turns):
    model, ids = tiny(kind), tokens(3, 90)
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :81] = 0, 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cache = KVQCache.from_model(model, "int8", recent_turns, page_size=16)
    batch = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert cache.sequences.padding == [0, 17, 81]
    for row, padding in enumerate(cache.sequences.padding):
        alone = KVQCache.from_model(model, "int8", recent_turns, page_size=16)
        out = model.generate(ids[row : row + 1, padding:], past_key_values=alone, **options)
        assert torch.equal(out[0], batch[row, padding:])
        # The same slots hold the same codes: padding takes no room and does not shift pages.
        pages = cache.sequences.tables[row]
        for ours, theirs in zip(cache.layers[0].pages[pages], alone.layers[0].pages):
            assert torch.equal(ours, theirs)


def test_positions_decide_the_key_offset_of_a_padded_row():
    """With positions off by the padding, R(position) mu would be taken off at the wrong angle: keys lose precision."""
    model, ids = tiny("qwen2"), tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :50] = 0
    plain, cache = transformers.DynamicCache(), KVQCache.from_model(model, "int4", 0, page_size=16)
    options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    for which in (plain, cache):
        model.generate(ids, attention_mask=mask, past_key_values=which, **options)
    keys, truth = stored(cache, 0)[0][0, :, 50:], plain.layers[0].keys[0, :, 50:]
    assert ((keys - truth).norm() / truth.norm()) < 0.01  # of keys that the bias dominates


def test_bytes_reported_are_the_bytes_held():
    model, ids = tiny("llama"), tokens(2, 200)
    cache = KVQCache.from_model(model, "int4", 0, page_size=32)
    assert cache.nbytes == 0 and cache.bits_per_element == 0
    feed(model, cache, ids, [200])
    layout = PageLayout(INT4, 32, 2, 64)
    pages, native, layers = 2 * 7, 2, 2  # 200 tokens take 7 pages of 32; the first of each row is native
    native_bytes = native * 2 * layout.native_page_bytes  # float32 here: twice bf16
    assert cache.nbytes == layers * (pages * layout.page_bytes + native_bytes) + 4 * pages
    assert cache.bits_per_element == pytest.approx(8 * cache.nbytes / (layers * 2 * 2 * 64 * 400))


def test_native_pages_may_be_narrower_than_the_model():
    model, ids = tiny("llama"), tokens(1, 64)
    cache = KVQCache.from_model(model, "int4", "all", native_dtype=torch.bfloat16)
    plain = transformers.DynamicCache()
    for which in (cache, plain):
        feed(model, which, ids, [64])
    assert torch.equal(stored(cache, 0)[0], plain.layers[0].keys.bfloat16().float())


def test_native_copies_are_freed_when_turns_grow_old():
    model = tiny("llama")
    cache = KVQCache.from_model(model, "int4", 1, page_size=16)
    sizes = []
    for turn in range(6):
        cache.start_turn()
        feed(model, cache, tokens(1, 64, seed=turn), [64])
        sizes.append(cache.layers[0].pool.shape[0])
    assert sizes == [4, 5, 5, 5, 5, 5]


def test_int8_follows_the_unquantized_model_closely_and_int4_less():
    model, ids = tiny("llama"), tokens(1, 200)
    truth = feed(model, transformers.DynamicCache(), ids, [200])
    errors = []
    for scheme in ("int8", "int4"):
        logits = feed(model, KVQCache.from_model(model, scheme, 0), ids, [200])
        errors.append(float((logits - truth).norm() / truth.norm()))
    assert 0 < errors[0] < 0.01 < errors[1] < 0.2


@pytest.mark.parametrize("recent_turns", [0, 2])
def test_crop_takes_tokens_back(recent_turns):
    model, ids = tiny("llama"), tokens(2, 120)
    once, twice = (KVQCache.from_model(model, "int4", recent_turns, page_size=32) for _ in range(2))
    feed(model, once, ids, [100, 20])
    feed(model, twice, torch.cat([ids[:, :100], tokens(2, 40, seed=5)], 1), [100, 40])
    twice.crop(torch.tensor(-40))  # as assisted generation does in transformers 5.17
    assert twice.get_seq_length() == 100 and twice.sequences.tables == [[0, 1, 2, 3], [4, 5, 6, 7]]
    feed(model, twice, ids[:, 100:], [20])
    for layer in range(2):
        for ours, theirs in zip(stored(twice, layer), stored(once, layer)):
            assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="crop by 121"):
        twice.crop(-121)


def test_assisted_generation_equals_greedy_generation():
    model = tiny("llama")
    prompt = tokens(1, 80)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    greedy = model.generate(prompt, past_key_values=KVQCache.from_model(model, "int8", "all"), **options)
    cache = KVQCache.from_model(model, "int8", "all")
    assisted = model.generate(prompt, past_key_values=cache, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(assisted, greedy)


def test_rows_can_be_selected_repeated_and_reordered():
    model, ids = tiny("llama"), tokens(3, 80)
    cache = KVQCache.from_model(model, "int4", 0, page_size=32)
    feed(model, cache, ids, [80])
    before = stored(cache, 1)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 1, 1, 0]))
    rows = torch.tensor([0, 2, 2, 2])
    for ours, theirs in zip(stored(cache, 1), before):
        assert torch.equal(ours, theirs[rows])
    # Copies are separate: writing to one row leaves its twin alone.
    feed(model, cache, tokens(4, 1, seed=3), [1])
    keys = stored(cache, 1)[0]
    assert not torch.equal(keys[1, :, 80], keys[2, :, 80])
    assert torch.equal(keys[1, :, :80], keys[2, :, :80])


def test_beam_search_runs_like_with_dynamic_cache():
    model, ids = tiny("llama"), tokens(2, 40)
    options = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours = model.generate(ids, past_key_values=KVQCache.from_model(model, "int8", "all"), **options)
    assert torch.equal(ours, model.generate(ids, **options))


def test_reset_gives_an_empty_cache():
    model, ids = tiny("llama"), tokens(1, 70)
    cache = KVQCache.from_model(model, "int4")
    first = feed(model, cache, ids, [70])
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    assert torch.equal(feed(model, cache, ids, [70]), first)


def test_memory_that_was_never_written_is_never_read(poison):
    model, ids = tiny("llama"), tokens(2, 90)
    logits = feed(model, KVQCache.from_model(model, "int4", 1, page_size=32), ids, [40, 1, 49])
    assert torch.isfinite(logits).all()


def test_calibrated_transforms_are_used():
    model = tiny("llama")
    transforms = [KeyTransform(2, 64, pair_scale=torch.full((2, 32), 4.0)) for _ in range(2)]
    cache = KVQCache.from_model(model, "int4", transforms=transforms)
    assert [layer.source.digest for layer in cache.layers] == [t.digest for t in transforms]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "int3"}, "scheme is 'int3'"),
        ({"recent_turns": -1}, "recent_turns is -1"),
        ({"recent_turns": "some"}, "recent_turns is 'some'"),
        ({"recent_turns": True}, "recent_turns is True; allowed: 0, 1, 2, ... or 'all'"),
        ({"page_size": 48}, "page_size is 48"),
        ({"page_size": "64"}, "page_size is '64'; it must be an integer"),
        ({"native_dtype": "x"}, "native_dtype is 'x'; allowed: float16, bfloat16, float32, or None"),
        ({"native_dtype": torch.int8}, r"native_dtype is torch\.int8; allowed: float16"),
        ({"transforms": [KeyTransform(2, 64)]}, "transforms has 1 entries"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        KVQCache.from_model(tiny("llama"), **arguments)


def test_transforms_of_another_shape_are_refused():
    model = tiny("llama")
    cache = KVQCache.from_model(model, transforms=[KeyTransform(4, 64)] * 2)
    with pytest.raises(ValueError, match="heads and head_dim must be"):
        feed(model, cache, tokens(1, 4), [4])


def test_sliding_window_models_are_refused():
    model = tiny("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding_attention"):
        KVQCache.from_model(model)


def test_another_batch_size_is_refused():
    model = tiny("llama")
    cache = KVQCache.from_model(model)
    feed(model, cache, tokens(2, 8), [8])
    with pytest.raises(ValueError, match="the batch has 1 rows"):
        feed(model, cache, tokens(1, 1), [1])


def test_positions_that_jump_are_refused():
    model = tiny("llama")
    cache = KVQCache.from_model(model)
    with pytest.raises(ValueError, match="do not count up"):
        model(tokens(1, 4), position_ids=torch.tensor([[0, 1, 3, 4]]), past_key_values=cache)
    cache = KVQCache.from_model(model)
    model(tokens(1, 4), position_ids=torch.arange(700, 704)[None], past_key_values=cache)
    assert cache.sequences.offsets == [700]
    with pytest.raises(ValueError, match="do not continue"):
        model(tokens(1, 1), position_ids=torch.tensor([[4]]), past_key_values=cache)


def test_nan_in_keys_is_named():
    model = tiny("llama")
    model.model.embed_tokens.weight.data[5] = float("nan")
    cache = KVQCache.from_model(model)
    with pytest.raises(ValueError, match=r"(?i)nan"):
        feed(model, cache, torch.tensor([[1, 5, 2]]), [3])


def test_the_packaged_model_answers_a_padded_batch_as_without_kvq():
    """Everything is recent in a first turn: the answers of a real model are the same, token for token."""
    from bench.models import model_path

    folder = model_path("smollm2-135m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = ["Water boils at", "The three largest planets are Jupiter, Saturn and"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 6, "do_sample": False}
    cache = KVQCache.from_model(model, "int4", 2)
    out = model.generate(**inputs, past_key_values=cache, **options)
    assert torch.equal(out, model.generate(**inputs, **options))
    assert "Uranus" in tokenizer.decode(out[1])
    assert cache.nbytes > 0
