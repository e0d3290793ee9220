"""`python -m rayfed` is the command `rayfed`."""

from rayfed.cli import main

main(prog_name="rayfed")
