from __future__ import annotations

import pytest

from retention.programs import PROBE_TURNS, Program, ProgramKey, ProgramRegistry


def key(i):
    return ProgramKey(f"p{i}")


def test_the_same_id_under_another_tenant_salt_or_adapter_is_another_program():
    registry = ProgramRegistry()
    keys = [ProgramKey("a"), ProgramKey("a", "t"), ProgramKey("a", "t", "s"), ProgramKey("a", "t", "s", "lora")]
    programs = {id(registry.touch(k, 0.0)) for k in keys}
    assert len(programs) == len(registry) == 4
    assert registry.touch(ProgramKey("a", "t"), 1.0) is registry.get(ProgramKey("a", "t"))


def test_idle_programs_are_forgotten_and_active_ones_are_not():
    registry = ProgramRegistry(idle_s=100.0)
    for i in range(3):
        registry.touch(key(i), 0.0)
    registry.touch(key(1), 50.0)
    registry.get(key(2)).live = 1
    assert [p.key for p in registry.sweep(101.0)] == [key(0)]
    assert registry.get(key(1)) and registry.get(key(2))
    registry.get(key(2)).live = 0
    assert {p.key for p in registry.sweep(500.0)} == {key(1), key(2)}


def test_memory_is_bounded_by_the_least_recently_active():
    registry = ProgramRegistry(max_programs=10)
    for i in range(1000):
        registry.touch(key(i), float(i))
        registry.sweep(float(i))
    assert len(registry) == 10
    assert registry.get(key(999)) and registry.get(key(0)) is None


def test_a_sweep_ends_when_every_program_has_a_request_in_flight():
    registry = ProgramRegistry(max_programs=1)
    for i in range(50):
        registry.touch(key(i), 0.0).live = 1
    assert registry.sweep(1e9) == []


@pytest.mark.parametrize("bad", [{"max_programs": 0}, {"idle_s": 0.0}, {"idle_s": float("nan")}])
def test_bad_bounds_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ProgramRegistry(**bad)


def make(prompt_tokens):
    program = Program(key(0), 0.0)
    program.prompt_tokens = prompt_tokens
    return program


def test_a_continued_prompt_keeps_everything():
    program = make(800)
    assert not program.learn_prefix(matched=992, kept=1000, block_tokens=16)
    assert program.worth_keeping(1500) == 1500


def test_reasoning_that_is_stripped_keeps_the_prompt_only():
    program = make(800)
    assert program.learn_prefix(matched=784, kept=1000, block_tokens=16)
    program.prompt_tokens = 1200
    assert program.worth_keeping(1500) == 1200


def test_a_header_that_changes_keeps_only_what_matched():
    program = make(800)
    assert program.learn_prefix(matched=0, kept=1000, block_tokens=16)
    assert program.worth_keeping(1500) == 0


def test_a_limit_is_tried_again_after_some_turns():
    program = make(800)
    program.learn_prefix(matched=0, kept=1000, block_tokens=16)
    kept = [program.worth_keeping(1500) for _ in range(PROBE_TURNS + 1)]
    assert kept == [0] * PROBE_TURNS + [1500]
