"""MXNet: array operations, gradients, access to memory."""
