"""Runs that are sent to a cluster as jobs, and runs that work on this machine."""
