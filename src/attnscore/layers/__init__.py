"""Layers: attention as modules with parameters, one file per framework.

A file imports its framework, so nothing here imports a file: ``from attnscore.layers.torch import ...`` is explicit.
"""
