"""How matplotlib's figures look."""

from pathlib import Path

STYLE = str(Path(__file__).parent / "figures.mplstyle")
INK = "#010203"  # of lines and letters, as in the style
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # as in the style
METADATA = dict.fromkeys(
    ("Creator", "Date", "Format", "Type")
)  # the same bytes for the same numbers
WIDTH = 9.0  # inches
LETTERS = 9.0  # points, as in the style
NAMED = 60  # class names that fit beside a heat map
LONGEST_NAME = 24  # characters, of a class or a run
PICTURES = (".png", ".svg", ".pdf")  # how the names of pictures end
