"""Ask Ray's job server for the jobs of a cluster, by the names of their runs, and for their logs.

A submission's id is made from its run's name. Its metadata describe it, and distinguish rayfed's
submissions from others. Plain HTTP requests ask the server's public REST interface:
`ray.job_submission`, which would do the same, takes 1.4 to 1.9 seconds to import, and `rayfed
status` takes 0.3. Only `submit` imports it, to upload the files.
"""

import json
import re
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from rayfed.base.errors import (
    LONGEST,
    ClusterLost,
    InputError,
    NoToken,
    cut,
    did_you_mean,
    first_line,
)
from rayfed.runtime import OWNER
from rayfed.runtime.private import RECIPE
from rayfed.runtime.proxies import proxies_for
from rayfed.runtime.tokens import ADVICE, read_token

# Seconds in which a cluster must answer.
REQUEST_LIMIT = 120.0
# Seconds from SIGTERM to SIGKILL, in which a run writes its checkpoint; Ray's default is 3.
STOP_LIMIT = 60
# Seconds from one request about a job to the next.
POLL = 1.0
# The metadata that hold the run's name.
RUN = "rayfed_run"
# What the server calls the states of a job, and what rayfed calls them.
STATUS = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "FAILED": "failed",
    "STOPPED": "stopped",
}


@dataclass(frozen=True)
class Submission:
    """A job that was submitted to the cluster, as its job server knows it now."""

    id: str
    # One of the values of `STATUS`.
    status: str
    # The run's name; '' for a job that rayfed has not submitted.
    run: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    started: datetime | None = None
    ended: datetime | None = None
    message: str = ""
    # The command's exit code, if it ended. A number below 0 is the signal that ended it.
    exit_code: int | None = None

    @property
    def over(self) -> bool:
        """Say whether the job has ended, however it did."""
        return self.status not in ("pending", "running")

    @property
    def took(self) -> timedelta | None:
        """Return the time from its start to its end, or until now."""
        return (self.ended or datetime.now(UTC)) - self.started if self.started else None


@dataclass(frozen=True)
class Jobs:
    """The job server of one cluster."""

    # The URL of its dashboard.
    address: str
    # What has named the address: --address, a variable of the environment, or '' for the default.
    named_by: str
    # Our token, once the server has asked for it.
    headers: dict[str, str] = field(default_factory=dict)

    def refuse_temporary(self) -> None:
        """Raise `InputError` where a run has started this Ray for itself.

        Such a Ray ends with that run.
        """
        owners = [(job.get("metadata") or {}).get(OWNER) for job in self.ask("GET", "/api/jobs/")]
        owner = next((owner for owner in owners if owner), None)
        if owner:
            raise InputError(
                f"the Ray at {self.address} belongs to the run '{owner}', and ends with it; start "
                f"a Ray that stays (`{RECIPE}`) after that run, or give the --address of another "
                "Ray"
            )

    def refuse_another_ray(self) -> None:
        """Raise `InputError` where the cluster has another Ray than this environment.

        A job on this machine runs in this environment, and joins the cluster as it begins.
        """
        # This module imports Ray, which takes a second.
        from rayfed.runtime.versions import refuse_others

        refuse_others(self.address, str(self.ask("GET", "/api/version")["ray_version"]))

    def submissions(self) -> list[Submission]:
        """Return every submission, the newest first."""
        submissions = []
        for details in self.ask("GET", "/api/jobs/"):
            if details["submission_id"]:
                submissions.append(_submission(details))

        def start(submission: Submission) -> datetime:
            """Return when a submission has started: now if it has not."""
            return submission.started or datetime.now(UTC)

        return sorted(submissions, key=start, reverse=True)

    def get(self, submission_id: str) -> Submission:
        """Return the submission with an id."""
        return _submission(self.ask("GET", f"/api/jobs/{submission_id}"))

    def find(self, name: str) -> Submission:
        """Return the newest submission of a run, or the one with this id.

        Raise `InputError` with the nearest name.
        """
        submissions = self.submissions()
        names = [submission.run for submission in submissions]
        names += [submission.id for submission in submissions]
        if name in names:
            return submissions[names.index(name) % len(submissions)]
        if not submissions:
            raise InputError(
                f"'{name}': nothing has been submitted to the cluster at {self.address}"
            )
        near = did_you_mean(name, {known for known in names if known})
        raise InputError(
            f"nothing called '{name}' was submitted to the cluster at {self.address}{near}"
        )

    def submit(
        self,
        command: Sequence[str],
        run: str,
        runtime_env: Mapping[str, Any],
        metadata: Mapping[str, str],
        **more: Any,
    ) -> Submission:
        """Run a command in a runtime environment of Ray.

        `more` are options of Ray's; without them, it runs on the head and without resources.
        """
        # Importing these takes a second.
        from ray.exceptions import AuthenticationError

        from rayfed.runtime import internals

        submission_id = id_for(run, {submission.id for submission in self.submissions()})
        variables = {
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_LIMIT),
            internals.UV_HOOK: "0",
            **runtime_env.get("env_vars", {}),
        }
        try:
            # These headers replace a token that Ray may find. They are dropped where a server sends
            # the request on.
            internals.job_client(self.address, self.headers, REQUEST_LIMIT).submit_job(
                entrypoint=shlex.join(command),
                submission_id=submission_id,
                runtime_env={**runtime_env, "env_vars": variables},
                metadata={RUN: run, "job_name": run, **metadata},
                **more,
            )
        except AuthenticationError:
            raise no_token(self.address) from None
        except OSError as error:
            # The library that Ray's client uses raises it.
            raise ClusterLost(
                f"the cluster at {self.address} does not answer any more ({brief(error)})"
            ) from None
        except RuntimeError as error:
            raise ClusterLost(
                f"the cluster at {self.address} refuses: {str(error).strip()}"
            ) from None
        return self.get(submission_id)

    def stop(self, submission_id: str) -> None:
        """Send SIGTERM, and after `STOP_LIMIT` seconds SIGKILL. Return at once."""
        self.ask("POST", f"/api/jobs/{submission_id}/stop")

    def log(self, submission_id: str) -> str:
        """Return all that the job has printed so far; '' once the node that it ran on is gone."""
        return self.ask("GET", f"/api/jobs/{submission_id}/logs")["logs"]

    def wait(self, submission_id: str, limit: float = STOP_LIMIT + 30) -> Submission:
        """Wait at most `limit` seconds for the end of a stopped job; return its last state."""
        end = time.monotonic() + limit
        submission = self.get(submission_id)
        while not submission.over and time.monotonic() < end:
            time.sleep(POLL)
            submission = self.get(submission_id)
        return submission

    def ask(self, method: str, path: str, limit: float = 0.0) -> Any:
        """Return the server's answer to a request of its REST interface.

        Raise `ClusterLost`, or `NoToken` where it does not take our token.
        """
        try:
            request = Request(self.address + path, method=method)
            # The headers go to the host that the user has named, and to no other.
            request.unredirected_hdrs |= self.headers
            opener = build_opener(ProxyHandler(proxies_for(self.address)))
            with opener.open(request, timeout=limit or REQUEST_LIMIT) as answer:
                return json.load(answer)
        except HTTPError as error:
            reason = ""
            with error, suppress(OSError, HTTPException):
                reason = cut(error.read().decode(errors="replace").strip(), LONGEST)
            if error.code in (401, 403):
                token = read_token()
                if self.headers or not token:
                    raise no_token(self.address) from None
                self.headers["Authorization"] = f"Bearer {token}"
                return self.ask(method, path, limit)
            raise ClusterLost(
                f"the cluster at {self.address} refuses: {reason or error}"
            ) from error
        except (OSError, HTTPException, ValueError, OverflowError, RecursionError) as error:
            raise ClusterLost(
                f"the cluster at {self.address} does not answer any more ({brief(error)})"
            ) from error


@dataclass
class Log:
    """Shows a job's log.

    `show` gets each piece of text once, even if `follow` is interrupted and called again.
    """

    jobs: Jobs
    submission_id: str
    show: Callable[[str], None]
    # The number of characters that were shown.
    shown: int = 0

    def follow(self) -> Submission:
        """Show the log as it grows, until the job is over; return how it ended."""
        while True:
            # Asked before the log: the log may still grow until the job is over.
            submission = self.jobs.get(self.submission_id)
            for line in self.jobs.log(self.submission_id)[self.shown :].splitlines(keepends=True):
                # Counted before it is shown: what an interrupt leaves in the buffer of stdout is
                # still written.
                self.shown += len(line)
                self.show(line)
            if submission.over:
                return submission
            time.sleep(POLL)


def id_for(run: str, taken: Collection[str]) -> str:
    """Return a submission id that is not taken, made of characters that a URL may have.

    >>> id_for("fedntd/table1", taken={"fedntd-table1"})
    'fedntd-table1-2'
    """
    base = re.sub(r"[^A-Za-z0-9._-]", "-", run)
    name = base
    number = 2
    while name in taken:
        name = f"{base}-{number}"
        number += 1
    return name


def no_token(url: str) -> NoToken:
    """Return the error where a cluster does not take our token."""
    return NoToken(
        f"the cluster at {url} asks for a token, and got none or a wrong token; {ADVICE}"
    )


def brief(error: BaseException) -> str:
    """Return the first line of an error, without the wrapping of urllib."""
    return cut(first_line(getattr(error, "reason", None) or error), LONGEST)


def _submission(details: Mapping[str, Any]) -> Submission:
    """Make a submission from a job's details, as the server gives them."""
    metadata = details["metadata"] or {}
    return Submission(
        id=details["submission_id"] or "",
        status=STATUS[details["status"]],
        run=metadata.get(RUN, ""),
        metadata=metadata,
        started=_time(details["start_time"]),
        ended=_time(details["end_time"]),
        message=details["message"] or "",
        exit_code=details["driver_exit_code"],
    )


def _time(milliseconds: int | None) -> datetime | None:
    """Return a time that is given in milliseconds since 1970; None where there is none."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC) if milliseconds else None
