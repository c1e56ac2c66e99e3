"""TensorFlow."""

from attnscore.backends.tensorflow.backend import TensorFlowBackend

__all__ = ["TensorFlowBackend"]
