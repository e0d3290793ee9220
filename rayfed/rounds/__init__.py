"""A run, round by round: tasks, one client's work, measures, the engine."""
