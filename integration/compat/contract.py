"""The contract with vLLM: names, and the arguments that this package passes to them."""

from __future__ import annotations

import importlib
import inspect
from functools import lru_cache
from importlib import metadata
from types import ModuleType

CORE_MODULE = "vllm.v1.engine.core"
SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
KNOWN = ((0, 26), (0, 33))  # first and last release that was tried

# module, class ("" for the module itself): {method: positional arguments it is called with}
CALLS: dict[tuple[str, str], dict[str, int]] = {
    (SCHEDULER_MODULE, "Scheduler"): {
        "schedule": 0,
        "update_from_output": 2,
        "add_request": 1,
        "_free_request": 1,
        "_free_blocks": 1,
        "reset_prefix_cache": 0,
        "shutdown": 0,
    },
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager"): {"get_computed_blocks": 1, "allocate_slots": 2},
    ("vllm.v1.core.block_pool", "BlockPool"): {
        "get_new_blocks": 1,
        "get_cached_block": 2,
        "touch": 1,
        "free_blocks": 1,
        "get_num_free_blocks": 0,
    },
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue"): {"remove": 1, "append_n": 1, "popleft_n": 1},
    ("vllm.v1.request", "Request"): {"get_finished_reason": 0, "is_finished": 0},
    (CORE_MODULE, "EngineCore"): {"reset_prefix_cache": 0},
}
# module, class: names that must be mentioned in the source of the class (attributes set in __init__, keywords)
ATTRIBUTES: dict[tuple[str, str], tuple[str, ...]] = {
    (SCHEDULER_MODULE, "Scheduler"): (
        "kv_cache_manager",
        "waiting",
        "running",
        "requests",
        "num_new_computed_tokens=",
        "_free_blocks",
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager"): ("coordinator", "block_pool", "skip_reading_prefix_cache"),
    ("vllm.v1.core.block_pool", "BlockPool"): ("free_block_queue", "num_gpu_blocks", "ref_cnt", "is_null"),
    ("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager"): (
        "req_to_blocks",
        "block_size",
        "block_pool",
    ),
    ("vllm.v1.request", "Request"): (
        "block_hashes",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "num_output_tokens",
        "cache_salt",
        "lora_request",
        "sampling_params",
        "status",
    ),
}
# How the free queue is linked, and everything that changes it. `RetainedQueue` orders queues that have nothing else.
QUEUE_LINKS = ("num_free_blocks", "fake_free_list_head", "fake_free_list_tail", "prev_free_block", "next_free_block")
QUEUE_METHODS = frozenset(
    {"popleft", "popleft_n", "remove", "append", "append_n", "prepend_n", "get_all_free_blocks", "iter_blocks_after"}
)


def vllm_version() -> str:
    """The installed release, "" without one."""
    try:
        return str(importlib.import_module("vllm.version").__version__)
    except Exception:
        return ""


def own_version() -> str:
    """Of kvq-toolkit, "" where it runs from a checkout that is not installed."""
    try:
        return metadata.version("kvq-toolkit")
    except metadata.PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def missing() -> tuple[str, ...]:
    """What the installed vLLM lacks of the contract, () if retention can work with it."""
    problems: list[str] = []
    for (module_name, class_name), calls in CALLS.items():
        owner = _class(module_name, class_name, problems)
        if owner is None:
            continue
        for method, arguments in calls.items():
            function = inspect.getattr_static(owner, method, None)
            if function is None:
                problems.append(f"{class_name}.{method}")
            elif not _accepts(function, arguments + 1):
                problems.append(f"{class_name}.{method} with {arguments} arguments")
    for (module_name, class_name), names in ATTRIBUTES.items():
        owner = _class(module_name, class_name, problems)
        if owner is None:
            continue
        source = _source(owner)
        problems += [f"{class_name}.{name.rstrip('=')}" for name in names if source and name not in source]
    return tuple(sorted(set(problems)))


@lru_cache(maxsize=4)
def check_queue(queue_class: type) -> tuple[str, ...]:
    """Why the free queue of this vLLM cannot be ordered, () if it can."""
    source = _source(queue_class)
    problems = [name for name in QUEUE_LINKS if name not in source]
    methods = {name for name in vars(queue_class) if callable(vars(queue_class)[name]) and not name.startswith("__")}
    return (*problems, *sorted(f"{name} is new" for name in methods - QUEUE_METHODS))


def _class(module_name: str, class_name: str, problems: list[str]) -> type | None:
    try:
        module: ModuleType = importlib.import_module(module_name)
    except ImportError as error:
        problems.append(f"{module_name} ({error})")
        return None
    owner = getattr(module, class_name, None)
    if owner is None:
        problems.append(f"{module_name}.{class_name}")
    return owner


def _accepts(function: object, arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(arguments))  # type: ignore[arg-type]
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _source(owner: type) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""
