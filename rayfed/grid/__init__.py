"""Make and run many jobs from one job file.

The way of a grid: `expand` (cells.py) makes its runs; the command `rayfed run` (cli/grid.py) skips
those that are done, and prints the table; `run_many` (many.py) runs the others, many at once
(`in_slots` in runtime/slots.py), or one after the other on all actors.
"""
