"""Measures: pure functions of counts, weights and activations, and the definitions of forgetting."""
