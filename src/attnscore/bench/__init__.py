"""The benchmark: named cases, one runner, peers side by side in one process. ``attnscore bench`` is its door.

Imports nothing, on purpose: PyTorch and the peers are imported by the process that measures.
"""
