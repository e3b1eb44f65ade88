"""deftune: SFT objectives as gate x error, from a token's statistics to its gradient.

>>> import torch, deftune
>>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
>>> loss = deftune.token_loss(logits, torch.tensor([1]), "deft")
>>> round(loss.item(), 4)
1.0917
"""

import importlib
from typing import TYPE_CHECKING, Any

from deftune._version import __version__

# name -> module: loaded at first use, so that `deftune --help` does not wait for torch
_HOMES = {
    # objectives
    "Context": "objectives",
    "Focus": "objectives",
    "IGNORE_INDEX": "objectives",
    "MODIFIERS": "objectives",
    "Modifier": "objectives",
    "OBJECTIVES": "objectives",
    "Objective": "objectives",
    "StepStatistic": "objectives",
    "StepStats": "objectives",
    "TokenStats": "objectives",
    "Weight": "objectives",
    "from_columns": "objectives",
    "objective": "objectives",
    "register": "objectives",
    "step_stats": "objectives",
    # losses
    "Sparse": "losses",
    "SparseReport": "losses",
    "VocabShard": "losses",
    "linear_loss": "losses",
    "linear_token_stats": "losses",
    "raise_pending": "losses",
    "token_loss": "losses",
    "token_stats": "losses",
    # training, evaluation, inspection
    "DeftSFTTrainer": "training.trainer",
    "compare": "comparison.schedule",
    "hf_loss": "training.hf",
    "inspect_rows": "inspection.inspect",
    "score_rows": "tokens.passes",
}

if TYPE_CHECKING:
    from deftune.comparison.schedule import compare
    from deftune.inspection.inspect import inspect_rows
    from deftune.losses import (
        Sparse,
        SparseReport,
        VocabShard,
        linear_loss,
        linear_token_stats,
        raise_pending,
        token_loss,
        token_stats,
    )
    from deftune.objectives import (
        IGNORE_INDEX,
        MODIFIERS,
        OBJECTIVES,
        Context,
        Focus,
        Modifier,
        Objective,
        StepStatistic,
        StepStats,
        TokenStats,
        Weight,
        from_columns,
        objective,
        register,
        step_stats,
    )
    from deftune.tokens.passes import score_rows
    from deftune.training.hf import hf_loss
    from deftune.training.trainer import DeftSFTTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deftune' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"deftune.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        advice = "pip install 'deftune[train]' (in a clone: -e '.[train]')"
        raise ModuleNotFoundError(f"{error}; deftune.{name} needs an extra: {advice}", name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "IGNORE_INDEX",
    "MODIFIERS",
    "OBJECTIVES",
    "Context",
    "DeftSFTTrainer",
    "Focus",
    "Modifier",
    "Objective",
    "Sparse",
    "SparseReport",
    "StepStatistic",
    "StepStats",
    "TokenStats",
    "VocabShard",
    "Weight",
    "__version__",
    "compare",
    "from_columns",
    "hf_loss",
    "inspect_rows",
    "linear_loss",
    "linear_token_stats",
    "objective",
    "raise_pending",
    "register",
    "score_rows",
    "step_stats",
    "token_loss",
    "token_stats",
]
