"""A process that writes a result until it is told to leave: what a second process meets."""

from deftune.evaluation.results import Result
from waiting import HANG_SECONDS


def hold(folder, settings, entered, leave):
    with Result(folder).writing(settings):
        entered.set()
        leave.wait(HANG_SECONDS)
