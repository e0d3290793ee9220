"""The token that Ray's processes show to each other: its file, which only its owner may read."""

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

ADVICE = (  # where a token is missing, or wrong
    "put the token that `ray get-auth-token` prints on the cluster's head node into ~/.ray/auth_token, or into "
    "RAY_AUTH_TOKEN"
)


def token_file() -> Path:
    """The file in which Ray looks for the token."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def read_token() -> str:
    """The token to show to a cluster; '' if there is none, or `RAY_AUTH_MODE` forbids it."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return ""
    token = os.environ.get("RAY_AUTH_TOKEN")
    if token:
        return token
    try:
        return token_file().read_text().strip()
    except OSError:
        return ""


def keep_private() -> None:
    """Let only the user read and write the token file. Logs a warning if others could read it."""
    path = token_file()
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
            if path.parent.stat().st_mode & 0o011:  # if not, the folder has kept others out
                log.warning("%s could be read by others; now only by you", path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s may be read by others, and that cannot be changed: %s", path, error)
