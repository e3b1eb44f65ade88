"""Training: any objective on a causal LM, on TRL's trainer or on transformers' own."""
