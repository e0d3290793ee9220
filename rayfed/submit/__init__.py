"""Runs that are sent to a cluster as jobs, and runs that work on this machine.

The way of a submission: the command `submit` (cli/submit.py) checks all jobs; `chosen` and `staged`
(package.py) choose and copy the files; `Jobs.submit` (runtime/jobs.py) gives them and the command
`python -m rayfed run` to Ray's job server. `local.py` is for runs on this machine.
"""
