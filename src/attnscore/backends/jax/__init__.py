"""JAX: array operations, gradients, access to memory."""
