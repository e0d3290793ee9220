"""The places where a round's work is done: this process, or Ray.

No other folder of this package imports Ray.
"""

# In the metadata of a Ray that a run has started for itself: the run's name.
OWNER = "rayfed_owner"
