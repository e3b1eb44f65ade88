"""A process that writes a result until it is told to leave: what a second process meets."""

from deftune.evaluation.results import Result
from waiting import HANG_SECONDS


def hold(folder, settings, tasks, entered, leave):
    with Result(folder).writing(settings, tasks):
        entered.set()
        leave.wait(HANG_SECONDS)
