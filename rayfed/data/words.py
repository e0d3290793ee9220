"""Text as words, and words as token numbers."""

import re
import zlib

# Letters and marks of scripts that put no spaces between words. Each is a word of its own.
SPACELESS = (
    # Thai
    "\u0e01-\u0e3a\u0e40-\u0e4e"
    # Lao
    "\u0e81-\u0ebd\u0ec0-\u0ece\u0edc-\u0edf"
    # Burmese
    "\u1000-\u103f\u1050-\u108f"
    # Khmer
    "\u1780-\u17d3\u17d7\u17dc\u17dd"
    # Japanese
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    # Japanese, half width.
    "\uff66-\uff9f"
    # Bopomofo
    "\u3105-\u312f\u31a0-\u31bf"
    # Chinese characters.
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case: runs of letters and digits; in scripts without spaces,
    each character.

    >>> words_of("The 2nd goal!"), words_of("第2场")
    (['the', '2nd', 'goal'], ['第', '2', '场'])
    """
    return WORD.findall(text.lower())


def number_of(word: str, vocabulary: int) -> int:
    """The token number of a word, 1 to `vocabulary` - 1: the same in every process and on every
    machine.

    >>> number_of("goal", 20_000)
    8686
    """
    return zlib.crc32(word.encode()) % (vocabulary - 1) + 1
