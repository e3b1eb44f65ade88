"""The study of docs/study: its plan, the committed results of its cells, and the pages that are written from them."""

from pathlib import Path

FOLDER = Path("benchmarks/study")
