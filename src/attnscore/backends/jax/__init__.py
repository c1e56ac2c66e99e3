"""JAX."""

from attnscore.backends.jax.backend import JaxBackend

__all__ = ["JaxBackend"]
