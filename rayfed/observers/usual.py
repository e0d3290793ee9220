"""The observers that every run has: its trackers and its page."""

from rayfed.folder.places import folder_of
from rayfed.job import Job
from rayfed.observers.page import Page
from rayfed.observers.trackers import Tracking
from rayfed.rounds.observer import Observer


def usual_observers(job: Job) -> list[Observer]:
    """Return the trackers that a job names, and its page.

    Raises `InputError`, with the command that helps, if the package of a tracker is not installed.
    """
    # A tracker that is named twice would get each number twice.
    observers: list[Observer] = [Tracking(name, job) for name in dict.fromkeys(job.track)]
    observers.append(Page(folder_of(job)))
    return observers
