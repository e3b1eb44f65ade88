"""Training: any objective on a causal LM, on TRL's trainer or on transformers' own."""

from deftune import artifacts as artifacts  # its filter of messages comes before TRL's import of bitsandbytes
