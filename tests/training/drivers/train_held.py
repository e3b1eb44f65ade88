"""`deftune train CONFIG`, sharded over CPUs; the checkpoint of one step is never whole: ``HOW STEP CONFIG``.

HOW is "held": the threads that write its shards never end; or "full": they meet a full disk.
"""

import errno
import os
import sys
import threading
from pathlib import Path

from sharding import allow_on_cpu
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from deftune.cli import main

if __name__ == "__main__":
    how, step, config = sys.argv[1:]
    write = FileSystemWriter.write_data

    def write_shards(self, *args, **kwargs):
        if f"checkpoint-{step}/" in str(self.path):
            if how == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(self, *args, **kwargs)
            Path(self.path, f"written-{os.environ['RANK']}").touch()
            threading.Event().wait()
        return write(self, *args, **kwargs)

    FileSystemWriter.write_data = write_shards
    allow_on_cpu()
    sys.exit(main(["train", config]))
