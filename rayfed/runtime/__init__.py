"""Where the work of a round is done: in this process, or on Ray. Nothing outside of this package knows Ray."""
