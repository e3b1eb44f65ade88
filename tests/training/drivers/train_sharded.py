"""`deftune train CONFIG`, sharded over CPUs."""

import sys

from sharding import allow_on_cpu
from torch.distributed.fsdp import FSDPModule

from deftune.cli import main
from deftune.training import trainer


class Watched(trainer.DeftSFTTrainer):
    def training_step(self, model, *args, **kwargs):
        assert isinstance(model, FSDPModule), "the model was not sharded"
        return super().training_step(model, *args, **kwargs)


if __name__ == "__main__":
    allow_on_cpu()
    trainer.DeftSFTTrainer = Watched
    sys.exit(main(["train", *sys.argv[1:]]))
