"""Benchmark of named cases against baselines, both sides in one process; ``python benchmarks run`` runs it.

Imports nothing: PyTorch and the baselines are imported by the process that measures.
"""
