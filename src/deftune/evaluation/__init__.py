"""Sample answers, extract and grade them, and compute scores with intervals."""
