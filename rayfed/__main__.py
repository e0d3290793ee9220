"""`python -m rayfed` is the command `rayfed`."""

from rayfed.cli import command

command()
