"""Checkpoints of several ranks: what they hold comes back, and a hostile one runs no code."""

import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as read_shards

from deftune.training import sharded


class Touch:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    torch.manual_seed(1)
    sharded.save(tmp_path, *trained())
    return tmp_path


def test_weights_and_optimizer_come_back(checkpoint):
    torch.manual_seed(1)
    model, optimizer = trained()
    torch.manual_seed(2)
    other, its_optimizer = trained()
    its_optimizer.param_groups[0]["lr"] = 7.0
    sharded.load(checkpoint, other, its_optimizer)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    assert its_optimizer.param_groups[0]["lr"] == 0.1
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(optimizer.state[mine]["exp_avg_sq"], its_optimizer.state[theirs]["exp_avg_sq"])


def test_a_hostile_index_runs_no_code(checkpoint, tmp_path):
    canary, index = tmp_path / "canary", checkpoint / sharded.FOLDER / ".metadata"
    index.write_bytes(pickle.dumps(Touch(canary)))
    with pytest.raises(ValueError, match="is no part of a checkpoint's index"):
        sharded.load(checkpoint, *trained())
    assert not canary.exists()


@pytest.mark.parametrize("name", ["os.system", "dataclass", "Sequence"])
def test_only_named_classes_of_torchs_module_are_read(name):
    with pytest.raises(ValueError, match="is no part"):
        sharded.IndexUnpickler(io.BytesIO()).find_class(sharded.METADATA, name)


def test_a_hostile_number_runs_no_code(tmp_path):
    """What is no tensor is an entry of its own in the shard; torch's own planner would unpickle it."""
    canary, checkpoint = tmp_path / "canary", tmp_path / "checkpoint"
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = Touch(canary)
    sharded.save(checkpoint, model, optimizer)
    canary.unlink(missing_ok=True)  # saving may copy the object
    with pytest.raises(ValueError, match=r"distributed: cannot be read: .*Weights only load failed"):
        sharded.load(checkpoint, *trained())
    assert not canary.exists()
    read_shards({"optimizer.param_groups.0.lr": 0.0}, checkpoint_id=checkpoint / sharded.FOLDER, no_dist=True)
    assert canary.exists(), "the attack itself works with torch's own reader"


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", pickle.dumps([1])])
def test_a_damaged_index_is_an_error_of_one_line(checkpoint, content):
    index = checkpoint / sharded.FOLDER / ".metadata"
    index.write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata: is (damaged|no index)") as caught:
        sharded.load(checkpoint, *trained())
    assert "\n" not in str(caught.value)


def test_shards_outside_the_checkpoint_are_refused(checkpoint, tmp_path):
    folder = checkpoint / sharded.FOLDER
    (shard,) = folder.glob("*.distcp")
    shutil.move(shard, tmp_path / "elsewhere.distcp")
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for entry in metadata.storage_data.values():
        entry.relative_path = "../elsewhere.distcp"
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="names a file outside the checkpoint"):
        sharded.load(checkpoint, *trained())
