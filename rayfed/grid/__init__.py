"""Make and run many jobs from one job file."""
