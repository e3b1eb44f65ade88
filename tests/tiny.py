"""The tiny model of `deftune selftest`, for every room's tests."""

from deftune.selftest.tiny import SPECIAL, TEXT, make_model, make_tokenizer, save_model

__all__ = ["SPECIAL", "TEXT", "make_model", "make_tokenizer", "save_model"]
