"""Rows of training data: read from files, the hub or generators, mixed, split, encoded and packed."""
