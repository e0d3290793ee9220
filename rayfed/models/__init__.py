"""Models that give penultimate features and logits, by name."""
