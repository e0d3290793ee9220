"""What `ray job submit` runs: the command `rayfed run`, as a script.

ray job submit --working-dir . -- python jobs/train.py jobs/quickstart.toml -s output.path=/shared/runs

The working folder is a copy that the cluster deletes, so results belong on storage that stays. `rayfed submit` sees to
that, and to more: docs/jobs.md.
"""

import sys

from rayfed.cli import command

command(["run", *sys.argv[1:]])
