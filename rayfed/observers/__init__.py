"""Observers that may watch a run besides the recorder: trackers of curves, and the page."""
