"""Fixtures of this room's tests."""

from chat_fixtures import chromium, data_file, make_run, model, model_folder, rows, run, tokenizer  # noqa: F401
from run_fixtures import chat_file, make_config, tiny_model  # noqa: F401
