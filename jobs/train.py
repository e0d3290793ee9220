"""What `ray job submit` runs: the command `rayfed run`, as a script.

ray job submit --working-dir . -- python jobs/train.py jobs/quickstart.toml -s
output.path=/shared/runs

The cluster deletes its copy of the working folder, so write results to storage that stays. `rayfed
submit` checks that, and does more: docs/jobs.md.
"""

import sys

from rayfed.cli import command

# In a wheel, this file is a module of the package.
if __name__ == "__main__":
    command(["run", *sys.argv[1:]])
