"""Whether a printed per cent can be a share of so many items."""


def on_grid(value: float, size: int, *, decimals: int = 2) -> bool:
    """Whether some k/size, in per cent and rounded to so many decimals, prints as this value.

    >>> on_grid(1.56, 128), on_grid(0.01, 128)
    (True, False)
    """
    nearest = round(value * size / 100)
    return any(abs(100 * k / size - value) <= 0.5 * 10**-decimals + 1e-9 for k in (nearest - 1, nearest, nearest + 1))


def truncated_on_grid(value: float, size: int, *, decimals: int = 2) -> bool:
    """Whether some k/size, in per cent and cut after so many decimals, prints as this value."""
    unit = 100 * 10**decimals
    shown = round(value * 10**decimals)
    lowest = shown * size // unit
    return any(unit * k // size == shown for k in (lowest, lowest + 1))
