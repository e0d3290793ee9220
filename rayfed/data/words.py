"""Text as words, and words as token numbers."""

import re
import zlib

# Some scripts put no spaces between words. Each of their letters and marks is a word of its own.
# The lines are Thai, Lao, Burmese, Khmer, Japanese, Japanese of half width, Bopomofo and Chinese.
SPACELESS = (
    "\u0e01-\u0e3a\u0e40-\u0e4e"
    "\u0e81-\u0ebd\u0ec0-\u0ece\u0edc-\u0edf"
    "\u1000-\u103f\u1050-\u108f"
    "\u1780-\u17d3\u17d7\u17dc\u17dd"
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    "\uff66-\uff9f"
    "\u3105-\u312f\u31a0-\u31bf"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case.

    Words are runs of letters and digits. In scripts without spaces each character is a word.

    >>> words_of("The 2nd goal!"), words_of("第2场")
    (['the', '2nd', 'goal'], ['第', '2', '场'])
    """
    return WORD.findall(text.lower())


def number_of(word: str, vocabulary: int) -> int:
    """Return the token number of a word, 1 to `vocabulary` - 1.

    It is the same in every process and on every machine.

    >>> number_of("goal", 20_000)
    8686
    """
    return zlib.crc32(word.encode()) % (vocabulary - 1) + 1
