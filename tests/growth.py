"""How the work of a function grows with its input, by cpu time: the machine's speed cancels in the ratio."""

import math
import time
from collections.abc import Callable


def assert_linear(function: Callable[[int], object], size: int) -> None:
    """Eight times the input in about eight times the time; a quadratic function takes 64 times.

    What shares the processor can only add: a measurement that fails is taken anew, three times, and the least counts.
    """

    def seconds(size: int) -> float:
        started = time.thread_time()
        function(size)
        return time.thread_time() - started

    small = large = math.inf
    for _ in range(3):
        large = min(large, seconds(size))
        if large < 0.05:  # no quadratic function of this size is done by now, and less is hard to measure
            return
        small = min(small, seconds(size // 8))
        if large < 24 * small:
            return
    raise AssertionError(f"{small:.3f} s of cpu time for {size // 8}, {large:.3f} s for {size}")
