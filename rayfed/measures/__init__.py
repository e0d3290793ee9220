"""Measures are pure functions of counts, weights and activations; they also define forgetting."""
