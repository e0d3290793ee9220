"""The client that a user means, by its number or by the name that it has in the data.

Clients are numbered from 0; `clients.parquet` has these numbers. Clients of a natural partition
also have names, and a name may be a number too: writer 2 need not be the client with the number 2.
"""

from collections.abc import Sequence

from rayfed.base.errors import InputError, did_you_mean

NUMBER, NAME = "number:", "name:"


def number_of(query: int | str, names: Sequence[str], count: int, place: str = "") -> int:
    """Return the number of the client that is asked for.

    A client is asked for by number, by name, as `number:2` or as `name:2`. `names` are the clients'
    names; they are empty if the clients have no names. `place` begins a message. Raises
    `InputError` if no client is meant, or if the number of a client is another client's name.

    >>> number_of("b", ["a", "b"], 2)
    1
    >>> number_of("number:1", ["1", "2"], 2), number_of("name:1", ["1", "2"], 2)
    (1, 0)
    >>> number_of(1, ["1", "2"], 2)
    Traceback (most recent call last):
        ...
    rayfed.base.errors.InputError: client 1: number 1 is the client named '2', and the client named
    '1' has number 0; \
    give number:1 or name:1
    """
    text = str(query).strip()
    prefix = f"{place}: " if place else ""
    by_number = _by_number(text.removeprefix(NUMBER), count)
    by_name = None
    if text.removeprefix(NAME) in names:
        by_name = names.index(text.removeprefix(NAME))
    if text.startswith(NUMBER) and text not in names:
        by_name = None
    elif text.startswith(NAME) or by_number is None or by_number == by_name:
        by_number = by_name
        by_name = None
    if by_number is None:
        by_names = f", or by name{did_you_mean(text, names)}" if names else ""
        raise InputError(
            f"{prefix}there is no client {text}; the clients are 0 to {count - 1}{by_names}"
        )
    if by_name is not None:
        raise InputError(
            f"{prefix}client {text}: number {text} is the client named '{names[by_number]}', and "
            f"the client named '{text}' has number {by_name}; give {NUMBER}{text} or {NAME}{text}"
        )
    return by_number


def to_ask_for(number: int, names: Sequence[str]) -> str:
    """Return what to give as a client's number so that no other is meant: `2`, or `number:2`.

    >>> to_ask_for(1, []), to_ask_for(1, ["1", "2"]), to_ask_for(1, ["0", "1"])
    ('1', 'number:1', '1')
    """
    is_anothers = str(number) in names and names.index(str(number)) != number
    return f"{NUMBER}{number}" if is_anothers else str(number)


def _by_number(text: str, count: int) -> int | None:
    """Return the number that a text says if it is the number of a client, or None."""
    if text.isascii() and text.isdigit() and int(text) < count:
        return int(text)
    return None
