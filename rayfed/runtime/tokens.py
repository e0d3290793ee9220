"""Find the token that Ray's processes show to each other, and keep its file private.

Only its owner may read the file.
"""

import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from rayfed.runtime import private

log = logging.getLogger(__name__)

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# What to do where a token is missing, or wrong.
ADVICE = (
    "put the token that `ray get-auth-token` prints on the cluster's head node into "
    "~/.ray/auth_token, or into RAY_AUTH_TOKEN"
)


def wanted() -> bool:
    """Say whether `RAY_AUTH_MODE` lets a token be shown, or leaves it open."""
    return os.environ.get(MODE, "token").lower() == "token"


def token_file() -> Path | None:
    """Return the file in which the user's token is looked for; None for a user without a home.

    Ray looks into HOME alone. The system may know the home folder of a user without that variable.
    """
    path = os.environ.get(PATH)
    if path:
        return Path(path)
    try:
        return Path.home() / ".ray" / "auth_token"
    except RuntimeError:
        # A user of a container may be only a number: neither HOME nor the system names a folder.
        return None


def read_token() -> str:
    """Return the token to show to a cluster; '' if there is none, or `RAY_AUTH_MODE` forbids it."""
    if not wanted():
        return ""
    return os.environ.get(TOKEN) or _content(token_file())


def token_is_named() -> bool:
    """Say whether there is a token, or a variable names its file."""
    return bool(read_token() or os.environ.get(PATH))


def keep_private() -> None:
    """Let only the user read and write the token file; log a warning if others could read it."""
    path = token_file()
    if path is None:
        return
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
            # Otherwise the folder has kept others out.
            if path.parent.stat().st_mode & 0o011:
                log.warning("%s could be read by others; now only by you", path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s may be read by others, and that cannot be changed: %s", path, error)


def for_a_new_ray() -> dict[str, str]:
    """Make a token where there is none; return the variables with which a new Ray finds it.

    A token is closed to other users before it is written: Ray would write it first. It lies in the
    user's home folder, or in the folder of our Rays where there is no home folder that can be
    written to. Raise `InputError` where there is neither.
    """
    if not wanted():
        return {}
    keep_private()
    if os.environ.get(TOKEN) or os.environ.get(PATH):
        return {}
    path = token_file()
    if path is not None:
        # The folder may be read-only, or not there.
        with suppress(OSError):
            _make(path)
        if _content(path):
            # Ray itself looks into HOME alone.
            return {} if os.environ.get("HOME") else {PATH: str(path)}
    path = private.home() / "auth_token"
    _make(path)
    return {PATH: str(path)}


def _content(path: Path | None) -> str:
    """Return the token in a file; '' if there is none that can be read."""
    if path is None:
        return ""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _make(path: Path) -> None:
    """Write a new token, unless there is one.

    Raise OSError. Whoever reads the file meanwhile sees a whole token.
    """
    if _content(path):
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    # A killed process with this number may have left its file.
    aside.unlink(missing_ok=True)
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, secrets.token_hex(32).encode())
        os.fsync(file)
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
        try:
            os.link(aside, path)
        except FileExistsError:
            # Another process was first, and its token is the one to use.
            return
        except OSError:
            # It is a file system without links.
            os.rename(aside, path)
    finally:
        os.close(file)
        aside.unlink(missing_ok=True)
