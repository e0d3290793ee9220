"""Where the work of a round is done: in this process, or on Ray. Nothing outside of this package knows Ray."""

OWNER = "rayfed_owner"  # metadata of a Ray that a run has started for itself, and ends: the run's name
