"""Places where a round's work is done: this process, or Ray.

No other folder of this package imports Ray.
"""

# The key in a Ray's metadata that holds the name of the run that has started this Ray for itself.
OWNER = "rayfed_owner"
