"""`deftune train CONFIG`, each layer and the vocabulary divided among CPUs."""

import sys

from sharding import allow_tensor_parallel_on_cpu

from deftune.cli import main
from deftune.training import trainer


class Watched(trainer.DeftSFTTrainer):
    def training_step(self, model, *args, **kwargs):
        weight = model.get_output_embeddings().weight
        assert weight.to_local().shape[0] < weight.shape[0], "the vocabulary was not divided"
        return super().training_step(model, *args, **kwargs)


if __name__ == "__main__":
    allow_tensor_parallel_on_cpu()
    trainer.DeftSFTTrainer = Watched
    sys.exit(main(["train", *sys.argv[1:]]))
