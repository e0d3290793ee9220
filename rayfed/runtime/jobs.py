"""Ray's job server: what has been submitted to a cluster, by the names of the runs, and its logs.

A submission's id is made of its run's name. The metadata that go with it say what it is; they are how rayfed's
submissions are told from others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from aiohttp import ClientError
from ray.dashboard.utils import get_address_for_submission_client
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from rayfed.provenance import COMMIT, commit
from rayfed.runtime import OWNER, trust
from rayfed.values import InputError, did_you_mean

USUAL = "http://127.0.0.1:8265"  # where a Ray has its dashboard unless it is told otherwise
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # that name a cluster; for Ray they win over any argument
ANSWER_LIMIT = 10.0  # seconds in which a cluster must answer that it is there
REQUEST_LIMIT = 120.0  # seconds in which it must answer anything else
STOP_LIMIT = 60  # seconds from SIGTERM to SIGKILL, in which a run writes its checkpoint; Ray's own are 3
POLL = 0.5  # seconds between two looks at a job that is about to end
RUN = "rayfed_run"  # the metadata in which the run's name is
STATUS = {"PENDING": "pending", "RUNNING": "running", "SUCCEEDED": "done", "FAILED": "failed", "STOPPED": "stopped"}

for module in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
    logging.getLogger(module).setLevel(logging.WARNING)  # they say what they upload, and that a log has ended


class NoRay(InputError):
    """No Ray answers where one would be on this machine, and nobody has named another place."""


class ClusterLost(RuntimeError):
    """A cluster that has answered does so no more, or does not do what it is asked."""


@dataclass(frozen=True)
class Submission:
    """A job that was submitted to the cluster, as its job server knows it now."""

    id: str
    status: str  # pending, running, done, failed, stopped
    run: str = ""  # the run's name; '' for what was submitted otherwise
    metadata: Mapping[str, str] = field(default_factory=dict)
    started: datetime | None = None
    ended: datetime | None = None
    message: str = ""
    exit_code: int | None = None  # of the command, if it ended by itself; below 0: by this signal

    @property
    def over(self) -> bool:
        return self.status not in ("pending", "running")

    @property
    def took(self) -> timedelta | None:
        """From its start to its end, or until now."""
        return (self.ended or datetime.now(UTC)) - self.started if self.started else None


class Client(JobSubmissionClient):
    """Ray's, which would wait for an answer without an end."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=REQUEST_LIMIT, **options)


class Jobs:
    """The job server of one cluster."""

    def __init__(self, address: str, named_by: str, client: JobSubmissionClient) -> None:
        self.address = address
        self.named_by = named_by  # --address, a variable of the environment, or '' for nobody
        self._client = client

    def refuse_passing(self) -> None:
        """Raises `InputError` where this Ray was started by a run for itself: it ends with that run."""
        with self._answering():
            owners = [(job.metadata or {}).get(OWNER) for job in self._client.list_jobs()]
        if owner := next(filter(None, owners), None):
            raise InputError(
                f"the Ray at {self.address} belongs to the run '{owner}', and ends with it; start one that stays: "
                "`ray start --head`, once that run is over, or give the --address of another"
            )

    def all(self) -> list[Submission]:
        """Every submission, the newest first."""
        with self._answering():
            found = [_submission(details) for details in self._client.list_jobs() if details.submission_id]
        return sorted(found, key=lambda one: one.started or datetime.now(UTC), reverse=True)

    def get(self, submission_id: str) -> Submission:
        with self._answering():
            return _submission(self._client.get_job_info(submission_id))

    def find(self, name: str) -> Submission:
        """The newest submission of a run, or the one with this id. Raises `InputError` with the nearest there is."""
        return pick(name, self.all(), self.address)

    def submit(
        self, command: Sequence[str], run: str, package: Path, metadata: Mapping[str, str] | None = None
    ) -> Submission:
        """Run a command in the unpacked package. It gets no resources of its own: a driver needs hardly any."""
        submission_id = id_for(run, {one.id for one in self.all()})
        with self._answering():
            self._client.submit_job(
                entrypoint=shlex.join(command),
                submission_id=submission_id,
                runtime_env={
                    "working_dir": str(package),
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_LIMIT), COMMIT: commit() or ""},
                },
                metadata={RUN: run, "job_name": run, **(metadata or {})},
            )
        return self.get(submission_id)

    def stop(self, submission_id: str) -> None:
        """Send SIGTERM; SIGKILL follows if the job has not ended after `STOP_LIMIT`. Returns at once."""
        with self._answering():
            self._client.stop_job(submission_id)

    def log(self, submission_id: str) -> str:
        """What the job has printed so far; '' once the node that it ran on is gone."""
        with self._answering():
            return self._client.get_job_logs(submission_id)

    def tail(self, submission_id: str) -> AsyncIterator[str]:
        """The log as it grows, always from its beginning, until the job is over or the connection is lost."""
        return self._client.tail_job_logs(submission_id)

    def wait(self, submission_id: str, limit: float = STOP_LIMIT + 30) -> Submission:
        """Wait for the end of a job that was stopped; gives it as it is when the limit, in seconds, is over."""
        end = time.monotonic() + limit
        while not (found := self.get(submission_id)).over and time.monotonic() < end:
            time.sleep(POLL)
        return found

    def is_here(self) -> bool:
        """Whether the head node is this machine, so that a path means the same there as here.

        Asked of the cluster, for its address does not tell: ports are forwarded.
        """
        with self._answering():
            try:
                heads = list_nodes(address=self.address, filters=[("is_head_node", "=", True)])
            except RayStateApiException:
                return False
        return any(_is_ours(head.node_ip) for head in heads if head.node_ip)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError:
            raise _no_token(self.address) from None
        except OSError as error:  # requests' errors are OSErrors
            raise ClusterLost(f"the cluster at {self.address} does not answer any more ({_brief(error)})") from None
        except RuntimeError as error:  # all else that the client raises
            raise ClusterLost(f"the cluster at {self.address} refuses: {_refusal(str(error))}") from None


def _refusal(text: str) -> str:
    """What a cluster says, with what helps where it does not say that."""
    if "No available agent" in text:
        text += (
            " A node that was just started needs some seconds; else another Ray on its machine has port 52365, and "
            "this one has to be started with --dashboard-agent-listen-port=52366"
        )
    return text.strip()


class Log:
    """A job's log, followed from where it was left; `show` gets each piece of text once."""

    def __init__(self, jobs: Jobs, submission_id: str, show: Callable[[str], None]) -> None:
        self._jobs, self._id, self._show = jobs, submission_id, show
        self._shown = 0  # characters

    def follow(self) -> Submission:
        """Show the log as it grows, until the job is over; give how it ended."""
        while True:
            with suppress(RuntimeError, ClientError, OSError):  # if only the connection was lost, it is made again
                asyncio.run(self._tail())
            if (found := self._jobs.get(self._id)).over:
                return found
            time.sleep(POLL)

    async def _tail(self) -> None:
        place = 0
        async for text in self._jobs.tail(self._id):
            new = text[max(0, self._shown - place) :]
            place += len(text)
            self._shown = max(self._shown, place)
            if new:
                self._show(new)


@contextmanager
def connected(given: str | None) -> Iterator[Jobs]:
    """The job server at an address: its URL, `host:port` of it or of the cluster itself, or `auto`.

    Where none is given, the environment names it, or it is the Ray on this machine. A token is shown if there is one.
    Raises `InputError` where no Ray answers, or refuses us; `NoRay` if, besides, nobody has named the address.
    """
    by = "--address" if given else next((name for name in VARIABLES if os.environ.get(name)), "")
    address = given or os.environ.get(by) or USUAL
    hidden = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    try:
        url = _url(address, by)
        trust.joining(url)
        if error := _unreachable(url):
            raise _nobody(address, by, error)
        try:
            client = Client(url)
        except AuthenticationError:
            raise _no_token(url) from None
        except Exception as error:  # no JSON, no version
            raise InputError(f"something answers at {url} that is no Ray ({_brief(error)})") from None
        yield Jobs(url, by, client)
    finally:
        os.environ.update(hidden)


def id_for(run: str, taken: Collection[str]) -> str:
    """A submission id that is not taken: the run's name, in letters that an URL and a file's name may have.

    >>> id_for("fedntd/table1", []), id_for("quickstart", ["quickstart", "quickstart-2"])
    ('fedntd-table1', 'quickstart-3')
    """
    base, number = re.sub(r"[^A-Za-z0-9._-]", "-", run), 1
    while (found := base if number == 1 else f"{base}-{number}") in taken:
        number += 1
    return found


def pick(name: str, submissions: Sequence[Submission], address: str) -> Submission:
    """Of submissions, newest first, the first of this run; or the one with this id."""
    for one in submissions:
        if one.run == name:
            return one
    for one in submissions:
        if one.id == name:
            return one
    if not submissions:
        raise InputError(f"'{name}': nothing has been submitted to the cluster at {address}")
    known = dict.fromkeys(word for one in submissions for word in (one.run, one.id) if word)
    raise InputError(
        f"nothing called '{name}' has been submitted to the cluster at {address}{did_you_mean(name, known)}"
    )


def _submission(details: JobDetails) -> Submission:
    metadata = details.metadata or {}
    return Submission(
        id=details.submission_id or "",
        status=STATUS[str(details.status)],
        run=metadata.get(RUN, ""),
        metadata=metadata,
        started=_time(details.start_time),
        ended=_time(details.end_time),
        message=details.message or "",
        exit_code=details.driver_exit_code,
    )


def _time(milliseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None


def _url(address: str, by: str) -> str:
    """The URL of the job server. Without `http://`, an address may be its own or the cluster's."""
    if address.startswith(("http://", "https://")):
        return address.rstrip("/")
    if address != "auto" and "://" not in address and not _unreachable(f"http://{address}"):
        return f"http://{address}"
    try:
        trust.joining(address)
        return get_address_for_submission_client(address)
    except InputError as error:
        raise InputError(str(error).replace("ray.address =", f"{by} =", 1)) from None
    except Exception as error:  # of many kinds, by where the search ended
        raise _nobody(address, by, error) from None


def _unreachable(url: str) -> Exception | None:
    """Why nothing answers at a URL; None if something does, and be it a refusal."""
    try:
        with urllib.request.urlopen(f"{url}/api/version", timeout=ANSWER_LIMIT):
            return None
    except HTTPError:
        return None
    except (OSError, HTTPException, ValueError) as error:  # the last where it is no address
        return error


def _is_ours(ip: str) -> bool:
    """Whether an address is this machine's: only then can a socket be bound to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
            probe.bind((ip, 0))
            return True
    except OSError:
        return False


def _nobody(address: str, by: str, error: Exception) -> InputError:
    said = f", which {by} names," if by.startswith("RAY") else ""
    return (InputError if by else NoRay)(
        f"no Ray answers at {address}{said} ({_brief(error)}); `ray start --head` starts one here, and --address names "
        f"another by its dashboard, such as {USUAL}"
    )


def _no_token(url: str) -> InputError:
    return InputError(
        f"the cluster at {url} asks for a token, and has got none or another; put the one that `ray get-auth-token` "
        "prints on its head node into ~/.ray/auth_token, or into RAY_AUTH_TOKEN"
    )


def _brief(error: Exception) -> str:
    """The first line of an error; of one that wraps others, as those of connections do, of the innermost."""
    inner: object = error
    while isinstance(inner, Exception):
        error, inner = inner, getattr(inner, "reason", None) or next(iter(inner.args), None)
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text.partition("Failed to establish a new connection: ")[2] or text
