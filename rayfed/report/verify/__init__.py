"""Checks of a run's folder, or of a published record of a run, against its job.

Some rounds are played again. `checks` (checks.py) goes through all of them in order, `Again`
(again.py) plays rounds, and numbers.py says how far numbers may differ.
"""
