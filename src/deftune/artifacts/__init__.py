"""Files and folders on disk: atomic files, sealed folders, runs with their config, models and tokenizers."""

import logging


def _is_no_note_on_kernels(record: logging.LogRecord) -> bool:
    """Whether a message of bitsandbytes is about something else than 4-bit kernels for a CPU.

    PEFT imports bitsandbytes where it is installed, and this message then precedes the first line of every run. deftune
    has no use for these kernels: they are for inference.
    """
    return "from kernels-community" not in str(record.msg)


logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_no_note_on_kernels)
