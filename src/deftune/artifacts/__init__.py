"""Files and folders on disk: atomic files, sealed folders, runs with their config, models and tokenizers."""
