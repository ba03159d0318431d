"""Queries, keys and values before attention: norms, rotary embedding, the write into the cache."""
