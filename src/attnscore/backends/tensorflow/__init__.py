"""TensorFlow: array operations, gradients, access to memory."""
