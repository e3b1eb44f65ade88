"""Comparisons: objectives x seeds x data in one resumable grid, its summary, tables and report."""
