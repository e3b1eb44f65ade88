"""A model of some thousand weights and a comparison over it that needs no file but the model's."""

from pathlib import Path

import yaml

import tiny
from deftune.comparison.grid import Comparison, load_comparison


def save_model(folder: Path) -> Path:
    tokenizer = tiny.make_tokenizer(["user assistant system sort these words in ascending order"])
    return tiny.save_model(folder, tokenizer, max_position_embeddings=2048)


def content(model: Path, folder: Path) -> dict:
    """Two objectives, two seeds, word sorting; asked eight FigFont items at two temperatures."""
    return {
        "folder": str(folder),
        "objectives": ["nll", "deft"],
        "seeds": [0, 1],
        "learning_rates": [1e-3],
        "model": {"name": str(model)},
        "train": {"max_steps": 3, "batch_size": 4, "micro_batch_size": 2, "save_steps": 2, "precision": "fp32"},
        "regimes": {
            "weak": {
                "data": {"train": [{"generate": "word_sorting", "limit": 12}], "max_length": 512},
                "evaluate": [
                    {"tasks": ["figfont"], "limit": 6, "temperatures": [0, 1], "samples": 2, "max_new_tokens": 4}
                ],
                "tokens": [{"generate": "word_sorting", "split": "test", "limit": 4}],
            }
        },
    }


def write(path: Path, what: dict) -> Path:
    path.write_text(yaml.safe_dump(what))
    return path


def comparison_at(tmp_path: Path, model: Path, **changes) -> Comparison:
    return load_comparison(write(tmp_path / "compare.yaml", content(model, tmp_path / "grid") | changes))
