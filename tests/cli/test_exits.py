"""The exit code of each way in which a command ends."""

import io
import subprocess
import sys

import click
import pytest

from rayfed.base import errors
from rayfed.cli import take_every_letter
from rayfed.cli.exits import Failure, failures
from rayfed.cli.guard import _explain

CODES = {
    errors.InputError: 2,
    errors.NoRay: 2,
    errors.NoToken: 2,
    errors.RunFailed: 1,
    errors.Diverged: 1,
    errors.BrokenContract: 1,
    errors.ClientFailed: 1,
    errors.Resumable: 75,
    errors.WorkersLost: 75,
    errors.KilledActors: 75,
    errors.Unwritable: 75,
    errors.Locked: 75,
    errors.ClusterLost: 1,
}
# Never end a command by themselves.
INSIDE = {
    errors.Torn,
    errors.Unlike,
    errors.NotSummable,
    errors.Restarted,
}


def test_every_error_of_the_package_has_its_code():
    ours = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, Exception)
        and kind.__module__ == errors.__name__
    }
    assert ours - INSIDE == set(CODES)
    for kind, code in CODES.items():
        with pytest.raises(Failure, match="as it is") as ended, failures():
            raise kind("as it is")
        assert (kind.exit_code, ended.value.exit_code) == (code, code)


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (RuntimeError("x"), 1), (MemoryError(), 1), (ValueError("x"), 1)],
)
def test_an_error_that_is_not_ours_is_a_failure_and_ctrl_c_a_stop(error, code):
    with pytest.raises(Failure) as ended, failures():
        raise error
    assert ended.value.exit_code == code


def test_a_traceback_is_shown_without_our_frames_only_where_others_are_in_it():
    ours = f'  File "{errors.__file__}", line 7, in cut\n    half = 1\n'
    others = '  File "mine.py", line 3, in begin\n    1 / 0\n'
    both = f"Traceback:\n{ours}{others}{ours}ZeroDivisionError\n"
    assert errors.without_ours(both) == f"Traceback:\n{others}ZeroDivisionError\n"
    only_ours = f"Traceback:\n{ours}ZeroDivisionError\n"
    assert errors.without_ours(only_ours) == only_ours


@pytest.mark.parametrize("error", [click.UsageError("x"), Failure("x", 7), BrokenPipeError()])
def test_what_has_its_own_end_keeps_it(error):
    with pytest.raises(type(error)) as ended, failures():
        raise error
    assert ended.value is error


@pytest.mark.parametrize(
    ("end", "code", "said"), [(None, 0, ""), (0, 0, ""), (3, 3, ""), ("why", 1, "why\n")]
)
def test_a_process_that_ends_under_working_threads_ends_as_python_ends(end, code, said):
    script = f"from rayfed.cli.exits import end_at_once; end_at_once(SystemExit({end!r}))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, said)


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (1, 75, "exit code 1: Ray does that when the node"),
        # Ray ends a process with code 1 alone: code of the user's did this, and would do it again.
        (7, 1, "exit code 7: code of yours may have called os._exit"),
        (0, 1, "exit code 0: code of yours may have called os._exit"),
    ],
)
def test_an_end_without_a_message_says_how_to_continue(capsys, ended, code, said):
    assert _explain(ended, "to continue: this") == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "to continue: this" in shown


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("ascii", "strict", rb"f\xfcr \u20ac \udcff"),
        ("latin-1", "strict", b"f\xfcr \\u20ac \\udcff"),
        ("utf-8", "strict", "für € ".encode() + rb"\udcff"),
        # As in the locale C
        ("utf-8", "surrogateescape", "für € ".encode() + b"\xff"),
    ],
)
def test_a_name_with_letters_that_the_terminal_lacks_is_printed(
    monkeypatch, encoding, errors, shown
):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, errors))
    take_every_letter()
    print("für € \udcff", end="", flush=True)
    assert written.getvalue() == shown
    monkeypatch.undo()
