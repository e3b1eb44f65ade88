"""Rows: real fine-tuning data read into one type, mixed and split, and the regimes that are generated."""
