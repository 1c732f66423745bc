"""Benchmarks, those behind records too: `python -m tools.bench NAME [--record]`.

`mismatch` and `logprobs` are in `numerics.py`, `rollout` and `update` in `speed.py`, the others in files of their own
names. `trace` also writes traces to `data/traces/`.
"""
