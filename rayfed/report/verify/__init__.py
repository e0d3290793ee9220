"""Checks of a run's folder, or of a published record of a run, against its job.

Some rounds are played again.
"""
