"""Models by name, which give penultimate features and logits."""
