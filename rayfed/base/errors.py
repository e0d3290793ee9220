"""Every error of this package, and the exit code of a command that ends with it.

0  done        2  bad input        75  it lost its workers or disk, or waits for a lock: resume it
1  failed                         130  stopped by Ctrl-C or SIGTERM: resume the run
"""

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

STOPPED = 130
# Characters of a value in a message.
LONGEST = 200
# Names in a message.
MANY = 40
# In an address: a key as the user; a password, even with / in it, but no port (S3 has none); the
# same in a parameter.
WITH_PASSWORD = re.compile(
    r"(?s)((?:https?|s3[an]?|ray|hf)://(?=[^/?#]+@)|s3[an]?://(?=[^/?#@\s]*:)|://(?=[^/?#:\s]*:(?!\d*(?:[/?#]|$)))"
    r"|[?&;#][^=&\s]*=(?=[^&\s:/@]*:[^&\s/@]+@))[^@\s]*(?=@)"
)
WITH_SECRET = re.compile(
    r"(?i)([?&;#](?:[^=&\s]*(?:secret|token|passw|signature|credential|(?:access|account|api)_?key|x-amz|x-goog)[^=&\s]*"
    r"|auth|key|pass|pwd|sig)=)"
    r"[^&\s'\"]*"
)
# Unicode's Cc, Cf, Cs, Zl and Zp, without those that words need (of Persian, of emojis).
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
PACKAGE = Path(__file__).parents[1]
# Of a traceback, perhaps of this package.
FRAME = re.compile(r'(?m)^  File ".*/rayfed/(.*)", line .*\n(?:    .*\n)*')
# How Python says what an option says, in a message for both.
IN_PYTHON = re.compile(r" \(in Python [^()]*\)")
# Of terminals.
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class InputError(ValueError):
    """Wrong input. The message says what was given, what is right, and what to do next."""

    exit_code = 2


class NoToken(InputError):
    """A cluster asks for a token, and takes none of ours."""


class NoRay(InputError):
    """No Ray answers on this machine, and the user named no other address."""


class RunFailed(RuntimeError):
    """A run cannot continue. The message says where and why."""

    exit_code = 1

    def __init__(self, message: str, client: int | None = None, round: int | None = None) -> None:
        super().__init__(message)
        # At which it failed, if it was at one.
        self.client, self.round = client, round


class Diverged(RunFailed):
    """A loss became NaN or infinite."""


class BrokenContract(RunFailed):
    """Code of the user's gave what it must not give.

    Its message says all: no traceback leads there.
    """


class ClientFailed(RunFailed):
    """An exception of the work, of a client or an evaluation, with its traceback.

    It would fail again on any worker.
    """


class Resumable(RunFailed):
    """The run can continue from its last checkpoint."""

    # EX_TEMPFAIL in sysexits.h: a temporary failure, try again.
    exit_code = 75


class WorkersLost(Resumable):
    """Workers are lost, or an object that only they held."""


class KilledActors(WorkersLost):
    """The actor of a piece of work died, or did not answer, each time that it was tried.

    `how` says which of the two.
    """

    def __init__(
        self,
        message: str,
        what: str = "",
        how: str = "",
        client: int | None = None,
        round: int | None = None,
    ) -> None:
        super().__init__(message, client, round)
        self.what, self.how = what, how


class Unwritable(Resumable):
    """Results cannot be written to the run's folder."""


class Locked(Resumable):
    """Another process writes to the run's folder, or a lost machine still holds its lock."""


class ClusterLost(RuntimeError):
    """A cluster refuses a request, or does not answer any more."""

    exit_code = 1


class Torn(ValueError):
    """A checkpoint cannot be used: a file is missing, damaged, or of an unknown version."""


class NotSummable(ValueError):
    """A summand holds a value of a kind that cannot be added, such as text.

    A NaN is another matter.
    """


class Unlike(ValueError):
    """A summand has another layout than the summands before it."""


class Restarted(RuntimeError):
    """Ray has restarted an actor, which has not opened the run again yet."""


def first_line(error: BaseException) -> str:
    """Return what an error says first; its type where it has no text.

    A sentence that goes on in the next line, such as "To fix this, either:", is left out; an only
    sentence is whole.

    >>> first_line(ValueError("It is closed. To fix this, either:\\n- open it"))
    'It is closed.'
    >>> first_line(ValueError())
    'ValueError'
    >>> first_line(ValueError("It was started with:\\n  Ray: 2.9\\n"))
    'It was started with: Ray: 2.9'
    """
    text = str(error).strip()
    line, _, more = text.partition("\n")
    if more and line.rstrip().endswith(":"):
        whole = re.match(r".*[.!?](?=\s)", line)
        line = whole[0] if whole else cut(" ".join(text.split()), LONGEST)
    return line or type(error).__name__


def nearest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return which of the valid names a wrong one probably means; '' if none is near.

    `cutoff`: 1 for equal names alone.

    >>> nearest("Fednt", ["fedavg", "fedntd"]), nearest("zzz", ["fedavg"])
    ('fedntd', '')
    """
    by_lower = {valid.lower(): valid for valid in sorted(names)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else ""


def did_you_mean(given: str, allowed: Iterable[str], near: str = "") -> str:
    """Return the end of a message about an unknown name: what was meant, and all valid names.

    What was meant is `near`, or else the nearest valid name. More than forty valid names are only
    counted.

    >>> did_you_mean("fednt", ["fedavg", "fedntd"])
    "; did you mean 'fedntd'? (valid: fedavg, fedntd)"
    """
    allowed = sorted(allowed)
    near = near or nearest(given, allowed)
    valid = (
        f"valid: {', '.join(allowed) or 'none'}"
        if len(allowed) <= MANY
        else f"{len(allowed)} names are valid"
    )
    return f"; did you mean '{near}'? ({valid})" if near else f" ({valid})"


def explained(error: Exception) -> str:
    """Return the message of a command that an error ends.

    An error of this package says everything; any other error needs its traceback.
    """
    if isinstance(error, InputError):
        text = str(error)
    elif type(error).__module__.partition(".")[0] == "rayfed":
        # Notes say where the results so far are.
        text = "\n".join([without_ours(str(error)), *getattr(error, "__notes__", [])])
    else:
        text = "the run failed\n" + "".join(traceback.format_exception(error)).rstrip()
    return cut(masked(f"error: {for_commands(text)}"))


def for_commands(text: str) -> str:
    """Return a message for somebody who types commands.

    It is without what to write in Python, and paths in the current folder begin there.

    >>> for_commands(f"'{os.getcwd()}/runs/x': give --force (in Python force=True)")
    "'runs/x': give --force"
    """
    here = re.escape(os.path.join(os.getcwd(), ""))
    # A path after `=` may be of a variable, whose program may work in another folder.
    return re.sub(rf"(?<![^\s'\"(]){here}(?=[\w.])", "", IN_PYTHON.sub("", text))


def without_ours(text: str) -> str:
    """Leave out the frames of this package from a traceback that has others; the log has all."""
    others = FRAME.sub(lambda frame: "" if (PACKAGE / frame[1]).is_file() else frame[0], text)
    return others if '  File "' in others else text


def cut(text: str, limit: int = 10_000) -> str:
    """Leave out the middle of a text that has more than `limit` characters.

    >>> cut("a" * 5 + "b" * 90 + "c" * 5, limit=10)
    'aaaaa\\n... 90 characters are left out here ...\\nccccc'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return (
        f"{text[:half]}\n"
        f"... {len(text) - 2 * half:,} characters are left out here ...\n"
        f"{text[-half:]}"
    )


def uncoloured(text: str) -> str:
    """Remove a terminal's colours from a text, such as those of Ray's tracebacks."""
    return COLOURS.sub("", text)


def masked(text: str) -> str:
    """Remove the passwords and keys of the addresses in a text.

    >>> masked("s3://ID:KEY@b/x?secret_key=1&region=2"), masked("hdfs://h:8020/a@b")
    ('s3://...@b/x?secret_key=...&region=2', 'hdfs://h:8020/a@b')
    """
    return WITH_SECRET.sub(r"\1...", WITH_PASSWORD.sub(r"\1...", text)) if "://" in text else text


def refuse_secrets(value: Any, key: str = "", kind: str = "address") -> None:
    """Raise `InputError` where a text in a value is an address with a password or a key.

    The message does not have the secret. `key` is that of a job file; without it, the message says
    of which kind the value is.
    """
    unread = [value]
    while unread:
        item = unread.pop()
        if isinstance(item, Mapping):
            unread.extend(item)
            unread.extend(item.values())
        elif isinstance(item, list | tuple):
            unread.extend(item)
        elif isinstance(item, str) and "://" in item and masked(unquote(item)) != unquote(item):
            scheme = re.split(r"[^\w+.-]", unquote(item).partition("://")[0].lower())[-1]
            place = f"{key} = '{scheme}://...'" if key else f"the {kind} '{scheme}://...'"
            raise InputError(
                f"{place}: the key or password in it would be shown in reports, in the job's files "
                "and in lists of processes; give the address without it, and set what its service "
                "reads, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, RAY_AUTH_TOKEN"
            )


def harmless(text: str) -> str:
    """Remove colours from a text, and spell out what else would steer a terminal or a page.

    Ends of lines and tabs stay.

    >>> harmless("a\\x1b[31mred\\x1b]0;title\\x07"), harmless("b\\u202e")
    ('ared\\\\x1b]0;title\\\\x07', 'b\\\\u202e')
    """
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], uncoloured(text))


def spelled(name: str, known: Iterable[str]) -> str:
    """Return a name as `known` spells it; a name that is not among them as it is.

    >>> spelled("FedNTD", ["fedavg", "fedntd"]), spelled("FedLMD-Tf", ["fedlmd_tf"])
    ('fedntd', 'fedlmd_tf')
    >>> spelled("Mine", ["fedavg"])
    'Mine'
    """
    plain = name.lower().replace("_", "-")
    for known_name in known:
        if known_name.lower().replace("_", "-") == plain:
            return known_name
    return name


def told(value: Any) -> str:
    """Return a value for a message: shortened, and without an address in memory.

    >>> told(object()), told(len), told("x" * 1000) == repr("x" * 200) + "..."
    ('an object of the class builtins.object', 'builtins.len', True)
    """
    # A generator has no module.
    if hasattr(value, "__qualname__") and hasattr(value, "__module__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__:  # type: ignore[comparison-overlap]
        return f"an object of the class {told(type(value))}"
    if isinstance(value, str) and len(value) > LONGEST:
        return repr(value[:LONGEST]) + "..."
    # As TOML has it.
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
