"""Silence for libraries, and their old settings after it."""

import warnings

import datasets
import pytest
from transformers.utils import logging

from deftune.artifacts.display import quiet


@pytest.mark.parametrize("bars", [True, False])
def test_libraries_are_quiet_inside_and_as_before_afterwards(bars, monkeypatch):
    monkeypatch.setattr(logging, "_tqdm_active", bars)
    level = logging.get_verbosity()
    with warnings.catch_warnings(record=True) as caught, quiet(), quiet():
        assert not logging.is_progress_bar_enabled() and datasets.are_progress_bars_disabled()
        assert logging.get_verbosity() == logging.ERROR
        warnings.warn_explicit("soon", FutureWarning, "x.py", 1, module="transformers.models")
    assert not caught
    assert logging.is_progress_bar_enabled() is bars and logging.get_verbosity() == level
    assert not datasets.are_progress_bars_disabled()


def test_an_error_inside_leaves_the_libraries_as_before():
    with pytest.raises(KeyError), quiet():
        raise KeyError
    assert logging.is_progress_bar_enabled() and not datasets.are_progress_bars_disabled()
