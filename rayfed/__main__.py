"""`python -m rayfed` is the command `rayfed`."""

import os
import sys

if sys.path[0] in ("", os.getcwd()):  # where Python looks first, also for modules such as html
    sys.path.append(sys.path.pop(0))

from rayfed.cli import command

command()
