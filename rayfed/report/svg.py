"""A drawing of matplotlib's as an element of the page: in the page's own colours, with titles over its points."""

import io
import json
import re
import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import ParamSpec
from urllib.parse import quote, unquote

from markupsafe import Markup, escape
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STYLE = str(Path(__file__).parent / "templates" / "figures.mplstyle")
INK = "#010203"  # stands for the page's colour of letters
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # as in the style
DASHES = ("", "5 2", "1.5 1.5")  # once the colours are used up
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
TITLES = "titles:"  # begins the id of points that have titles; the titles follow, as JSON without quotes
P = ParamSpec("P")


def svg(draw: Callable[P, Figure]) -> Callable[P, Markup]:
    """Make a drawing SVG to stand in a page: the same bytes for the same numbers, and no links."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Markup:
        text = io.StringIO()
        options = {"savefig.transparent": True, "svg.hashsalt": draw.__name__}  # so ids differ between figures
        with style.context(["default", STYLE, options]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser's font has it
            draw(*args, **kwargs).savefig(text, format="svg", metadata=METADATA)
        return Markup(embedded(text.getvalue()))

    return drawn


def embedded(document: str) -> str:
    """An SVG document as an element of an HTML page."""
    element = document[document.index("<svg") :].replace(INK, "currentColor")
    for number in range(len(COLOURS)):
        element = element.replace(COLOURS[number].lower(), look(number)[0])
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", element)
    element = re.sub(f'<g id="{TITLES}([^"]*)">(.*?)</g>', _titled, element, flags=re.DOTALL)
    return re.sub(r'<g id="[^"]*"', "<g", element)


def look(number: int) -> tuple[str, str]:
    """The n-th of several lines in the page's style: its colour, which is brighter in the dark, and its dashes."""
    colour = number % len(COLOURS)
    return f"var(--line-{colour + 1}, {COLOURS[colour].lower()})", DASHES[number // len(COLOURS) % len(DASHES)]


def title_points(axes: Axes, titles: Mapping[tuple[float, float], str]) -> None:
    """Invisible points, over which a browser shows a title each."""
    x, y = zip(*titles, strict=True)
    axes.plot(x, y, linestyle="", marker="o", markersize=9, alpha=0, gid=TITLES + quote(json.dumps([*titles.values()])))


def _titled(points: re.Match[str]) -> str:
    start, *uses = points[2].split("<use")
    pairs = zip(uses, json.loads(unquote(points[1])), strict=True)
    titled = (use.replace("/>", f"><title>{escape(title)}</title></use>") for use, title in pairs)
    return "<use".join([f"<g>{start}", *titled]) + "</g>"
