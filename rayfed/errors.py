"""Every error of this package, and the exit code of a command that ends with it.

0  done        2  bad input        75  the run lost its workers or its disk: resume it
1  failed                         130  stopped by Ctrl-C or SIGTERM: resume the run
"""

import difflib
from collections.abc import Iterable

STOPPED = 130


class InputError(ValueError):
    """Wrong input. The message says what was given, what is right, and what to do next."""

    exit_code = 2


class NoRay(InputError):
    """No Ray answers on this machine, and the user named no other address."""


class RunFailed(RuntimeError):
    """A run cannot continue. The message says where and why."""

    exit_code = 1


class Diverged(RunFailed):
    """A loss became NaN or infinite."""


class ClientFailed(RunFailed):
    """A client's own exception, with its traceback. It would fail again on any worker."""

    def __init__(self, message: str, client: int | None = None, round: int | None = None) -> None:
        super().__init__(message, client, round)  # all three, so that the error can be pickled
        self.client, self.round = client, round  # None where an evaluation failed

    def __str__(self) -> str:
        return self.args[0]


class Resumable(RunFailed):
    """The run can continue from its last checkpoint."""

    exit_code = 75  # EX_TEMPFAIL in sysexits.h: a temporary failure, try again


class WorkersLost(Resumable):
    """Workers are lost, or an object that only they held."""


class KilledActors(WorkersLost):
    """A piece of work whose actor died, or did not answer, each time that it was tried; `how` says which."""

    def __init__(
        self, message: str, what: str = "", how: str = "", client: int | None = None, round: int | None = None
    ) -> None:
        super().__init__(message, what, how, client, round)
        self.what, self.how, self.client, self.round = what, how, client, round

    def __str__(self) -> str:
        return self.args[0]


class Unwritable(Resumable):
    """Results cannot be written to the run's folder."""


class ClusterLost(RuntimeError):
    """A cluster refuses a request, or does not answer any more."""

    exit_code = 1


class Torn(ValueError):
    """A checkpoint cannot be used: a file is missing, damaged, or of an unknown version."""


class Unlike(ValueError):
    """A summand has another layout than the summands before it."""


class Restarted(RuntimeError):
    """Ray has restarted an actor, which has not opened the run again yet."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest valid name, and all valid names.

    >>> did_you_mean("fednt", ["fedavg", "fedntd"])
    "; did you mean 'fedntd'? (valid: fedavg, fedntd)"
    """
    allowed = sorted(allowed)
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    return (f"; did you mean '{near[0]}'?" if near else "") + f" (valid: {', '.join(allowed) or 'none'})"
