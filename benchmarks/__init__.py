"""Measurements, and the study: scripts of the repository, which are not installed."""
