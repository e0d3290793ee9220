"""Numbers as the page says them."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from markupsafe import Markup

from rayfed.report.forms import spread


def percent(share: float | None) -> str:
    """
    >>> percent(0.5), percent(None)
    ('50.0%', 'n/a')
    """
    return "n/a" if share is None or np.isnan(share) else f"{100 * share:.1f}%"


def mean_percent(shares: Sequence[float]) -> str:
    """
    >>> mean_percent([0.5, 0.7]), mean_percent([0.5])
    ('60.0 ± 14.1%', '50.0%')
    """
    average, deviation = spread(shares) if shares else (math.nan, None)
    return percent(average) if deviation is None else f"{100 * average:.1f} ± {100 * deviation:.1f}%"


def points(value: float, ends: tuple[float, float] | None = None) -> str:
    """A difference in points of accuracy, with its interval.

    >>> points(1.25), points(-3.0, (-4.0, -2.0))
    ('+1.2 points', '-3.0 points (95% interval -4.0 to -2.0)')
    """
    return f"{value:+.1f} points" + (f" (95% interval {ends[0]:+.1f} to {ends[1]:+.1f})" if ends else "")


def listed(values: Iterable[object]) -> str:
    """
    >>> listed([0, 1, 1]), listed("abcdefgh")
    ('0, 1, 1', 'a, b, c, d, e, f and 2 more')
    """
    words = [str(value) for value in values]
    return ", ".join(words[:6]) + (f" and {len(words) - 6:,} more" if len(words) > 6 else "")


def isolated(name: str) -> str:
    """A name within a sentence: its marks of direction end with it."""
    return f"\u2068{name}\u2069"


def bar(share: float) -> Markup:
    """A bar over a share of the width; none for an unknown or negative share."""
    return Markup(f'<div class="bar" style="width: {100 * max(np.nan_to_num(share), 0):.1f}%"></div>')


def wilson(share: float, count: int) -> tuple[float, float]:
    """A 95 % interval of a share of so many images: Wilson's score interval, which stays within 0 and 1.

    >>> wilson(0.5, 100), wilson(0.0, 10)
    ((0.4038..., 0.5961...), (0.0, 0.2775...))
    """
    square = 1.959964**2
    middle, width = share + square / (2 * count), square * (share * (1 - share) + square / (4 * count)) / count
    ends = ((middle + sign * math.sqrt(width)) / (1 + square / count) for sign in (-1, 1))
    low, high = (min(max(end, 0.0), 1.0) for end in ends)
    return low, high
