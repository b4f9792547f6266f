"""Programs (agents): who they are, which turn they are in, and what they wait for."""

from __future__ import annotations

from typing import NamedTuple


class ProgramKey(NamedTuple):
    """Identity of a program. Everything that keeps KV caches apart is part of it, so a lease of one tenant, salt or
    adapter can never be reached, extended or replaced through the same program id of another.

    program_id: the caller's name for the agent. tenant: trusted owner. salt: vLLM's cache_salt. adapter: LoRA name.
    """

    program_id: str
    tenant: str = ""
    salt: str = ""
    adapter: str = ""
