"""Adapters that put kvq and retention into other people's engines.

``integration.transformers_cache.KVQCache`` is a transformers cache. Nothing here is imported until it is asked for, so
that each adapter needs only its own engine.
"""
