"""Answers, scored: extraction, grading in workers that can be killed, and the statistics of a score."""
