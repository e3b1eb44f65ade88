"""Training: any objective on a causal LM, on TRL's trainer or on transformers' own."""

import deftune.artifacts  # noqa: F401  # its filter of messages, before TRL and with it PEFT are imported
