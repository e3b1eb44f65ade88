"""One look for every figure: an objective has one colour, line and marker everywhere; text stays text.

A table is a pyarrow Table or a list of lines (dicts). `save_figure` puts it beside the picture.
"""

from __future__ import annotations

import csv
import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_P = ParamSpec("_P")
_R = TypeVar("_R")

Table = Any
"""A pyarrow Table, or a list of lines: dicts with the same keys."""

COLUMN_INCHES, PAGE_INCHES = 3.35, 6.9
"""The widths of a column and of a page of a two-column paper: figures are drawn in the size they are printed."""

RC: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "legend.frameon": False, "figure.titlesize": 8,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "lines.linewidth": 1.3,
    "lines.markersize": 3.5, "patch.linewidth": 0.6, "hatch.linewidth": 0.5, "grid.alpha": 0.25, "grid.linewidth": 0.5,
    "svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "deftune", "savefig.dpi": 300,
}  # fmt: skip
COLOUR_MAP = "viridis"  # its lightness rises evenly: safe for the colour-blind, and in grey


class Look(NamedTuple):
    """How an objective is drawn."""

    colour: str
    line: Any
    marker: str


# Okabe and Ito's palette, safe for the colour-blind. Lines and markers distinguish objectives in grey.
LOOKS = {
    "base": Look("#7F7F7F", "-", "x"),
    "nll": Look("#000000", "-", "o"),
    "linear": Look("#D55E00", (0, (5, 1.5)), "s"),
    "hellinger": Look("#E69F00", (0, (3, 1.2, 1, 1.2)), "P"),
    "cayley": Look("#0072B2", (0, (7, 1.5, 1.5, 1.5)), "^"),
    "deft": Look("#009E73", "-", "D"),
    # candidates of the study, which one picture has side by side
    "deft | floor(0.2)": Look("#882255", (0, (6, 1.2)), "*"),
    "deft | floor(0.05)": Look("#88CCEE", (0, (1.2, 1.2)), "<"),
    "deft | floor(0.1)": Look("#B8A900", (0, (4, 1, 1, 1)), ">"),
    "deft | floor(0.4)": Look("#762A83", (0, (2, 1)), "h"),
    "deft | warmup(0.25)": Look("#C51B7D", (0, (6, 2)), "d"),
    "mile": Look("#4D4D4D", (0, (4, 1, 1, 1)), "p"),
    "eaft": Look("#CC79A7", (0, (1.2, 1.2)), "v"),
    "dft": Look("#8C510A", (0, (5, 1.5)), "s"),
    "clip": Look("#56B4E9", "-", "p"),
}
SPARE_COLOURS = ("#56B4E9", "#B8A900", "#8C510A", "#762A83", "#1B7837", "#4D4D4D", "#C51B7D")
SPARE_LINES = ((0, (4, 1, 1, 1)), (0, (2, 1)), (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))
SPARE_MARKERS = ("h", "<", ">", "*", "X", "d")


def look_of(name: str) -> Look:
    """The look of an objective's spec, the same in every figure, whatever else is drawn.

    A modified objective keeps the colour of the one it is made of; one that has no look of its own gets one from its
    name.

    >>> look_of("deft").colour == look_of("deft | eos(nll)").colour
    True
    """
    if name in LOOKS:
        return LOOKS[name]
    number = zlib.crc32(name.encode())
    line, marker = SPARE_LINES[number % len(SPARE_LINES)], SPARE_MARKERS[number // 7 % len(SPARE_MARKERS)]
    base = LOOKS.get(name.split("|")[0].strip())
    return Look(base.colour if base else SPARE_COLOURS[number % len(SPARE_COLOURS)], line, marker)


def line_style(name: str) -> dict[str, Any]:
    """What `Axes.plot` takes for an objective's line."""
    look = look_of(name)
    return {"color": look.colour, "ls": look.line, "label": name}


def styled(draw: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that draws, in this style whatever the user's own settings are."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            import matplotlib
        except ImportError as error:
            raise ValueError("figures need matplotlib: pip install 'deftune[plot]'") from error
        with matplotlib.rc_context():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(RC)
            return draw(*args, **kwargs)

    return drawn


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure of ``size`` inches and its axes, [rows][columns]."""
    from matplotlib.figure import Figure  # pyplot would pick a display; a figure needs none

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def columns_of(table: Table, names: Sequence[str], what: str) -> dict[str, Any]:
    """The named columns as numpy arrays; a table that lacks one is refused, and so is an empty one."""
    import numpy as np

    if not len(table):
        raise ValueError(f"{what}: the table is empty")
    arrow = hasattr(table, "column_names")
    have: list[str] = list(table.column_names if arrow else table[0])
    if missing := [name for name in names if name not in have]:
        shown = [*have[:12], *(["..."] if len(have) > 12 else [])]  # a token table has dozens
        raise ValueError(f"{what}: the table has no column {missing[0]!r} (it has {', '.join(shown)})")
    if arrow:
        return {name: table[name].to_numpy(zero_copy_only=False) for name in names}
    return {name: np.asarray([line[name] for line in table]) for name in names}


def rows_of(columns: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """The rows of some columns (numpy arrays) in which each named column has the given value.

    >>> import numpy as np
    >>> rows_of({"name": np.array(["a", "b", "a"]), "x": np.array([1, 2, 3])}, name="a")["x"]
    array([1, 3])
    """
    import numpy as np

    chosen = np.logical_and.reduce([columns[name] == value for name, value in values.items()])
    return {name: column[chosen] for name, column in columns.items()}


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values, each once, in the order in which they come."""
    return list(dict.fromkeys(values))


def legend_below(figure: Figure, axes: Sequence[Any]) -> None:
    """One legend for all panels, each name once, where it hides nothing."""
    found: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles))
    columns = max(2, int(figure.get_figwidth() / 1.1))  # inches that a name takes
    rows = -(-len(found) // columns)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=-(-len(found) // rows))


@styled
def save_figure(figure: Figure, stem: str | Path, table: Table) -> list[Path]:
    """``stem``.png, .svg and .pdf, and the table beside them: Parquet for a pyarrow Table, else CSV; the paths.

    The same figure makes the same files: they hold no date.
    """
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "pdf")]
    undated: list[dict[str, Any]] = [{}, {"Date": None}, {"CreationDate": None}]
    for path, metadata in zip(paths, undated):
        figure.savefig(path, metadata=metadata)
    return [*paths, write_table(stem, table)]


def write_table(stem: Path, table: Table) -> Path:
    if hasattr(table, "column_names"):
        import pyarrow.parquet as pq

        path = stem.with_name(f"{stem.name}.parquet")
        pq.write_table(table, path, compression="zstd")
        return path
    path = stem.with_name(f"{stem.name}.csv")
    with path.open("w", newline="", encoding="utf-8") as sink:
        writer = csv.DictWriter(sink, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    return path


TEXT_COLUMNS = ("regime", "objective", "model", "run", "pair")  # names, even if they are blank or look like numbers


def read_table(path: str | Path) -> Table:
    """A table that `save_figure` wrote: Parquet, or CSV with its numbers as numbers and blanks as NaN."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        if Path(path).suffix == ".parquet":
            return parquet.read_table(path)
        text = csv.ConvertOptions(column_types=dict.fromkeys(TEXT_COLUMNS, pa.string()))
        table = csv.read_csv(path, convert_options=text)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: holds no table ({error})") from error
    blank = [pa.field(f.name, pa.float64() if pa.types.is_null(f.type) else f.type) for f in table.schema]
    return table.cast(pa.schema(blank))
