"""Trees of tensors, and weights by name."""
