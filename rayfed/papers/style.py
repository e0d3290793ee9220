"""How matplotlib's figures look."""

from pathlib import Path

STYLE = str(Path(__file__).parent / "figures.mplstyle")
# Of lines and letters, as in the style.
INK = "#010203"
# As in the style.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# The same bytes for the same numbers.
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# Inches
WIDTH = 9.0
# Points, as in the style.
LETTERS = 9.0
# Class names that fit beside a heat map.
NAMED = 60
# Characters, of a class or a run.
LONGEST_NAME = 24
# How the names of pictures end.
PICTURES = (".png", ".svg", ".pdf")
