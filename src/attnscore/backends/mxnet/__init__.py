"""MXNet."""

from attnscore.backends.mxnet.backend import MxnetBackend

__all__ = ["MxnetBackend"]
