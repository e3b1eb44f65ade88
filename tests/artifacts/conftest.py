"""Fixtures of this room's tests."""

from run_fixtures import chat_file, make_config, tiny_model  # noqa: F401
