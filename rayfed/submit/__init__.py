"""A run as a job on a cluster."""
