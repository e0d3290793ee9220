"""The ground: errors, checked values, seeds, isolation of hooks, files, spans of time."""
