"""The look of matplotlib's figures."""

from pathlib import Path

STYLE = str(Path(__file__).parent / "figures.mplstyle")
# The colour of lines and letters, as in the style.
INK = "#010203"
# The colour of a remark that a figure is not what its paper shows.
WARNING = "#b3261e"
# The colours of lines, as in the style.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Without these entries, the same numbers give the same bytes.
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# The width of a figure in inches.
WIDTH = 9.0
# The size of letters in points, as in the style.
LETTERS = 9.0
# Most class names that fit next to a heat map.
NAMED = 60
# Most characters of the name of a class or a run.
LONGEST_NAME = 24
# The suffixes of pictures.
PICTURES = (".png", ".svg", ".pdf")
