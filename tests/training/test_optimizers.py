"""The optimizers beside AdamW."""

import copy

import pytest
import torch
from small import make_arguments, make_model, make_rows, make_trainer

from deftune.artifacts.config import ConfigError
from deftune.training.machine import check_config
from deftune.training.optimizers import MuonAdamW, muon_factory


def options(lr: float = 1e-2) -> dict:
    return {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}


def filled(model, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def test_muon_takes_the_layers_matrices_and_adamw_the_rest():
    model = make_model(torch.float32, tie_word_embeddings=False)
    optimizer = MuonAdamW(model, **options())
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = ({names[id(p)] for group in part.param_groups for p in group["params"]} for part in optimizer.parts)
    assert muon | adamw == set(names.values()) and not muon & adamw
    assert all(".layers." in name and "norm" not in name for name in muon) and len(muon) == 2 * 7
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= adamw


def test_a_step_is_the_step_of_the_two_optimizers():
    model, twin = (filled(make_model(torch.float32)) for _ in range(2))
    optimizer = MuonAdamW(model, **options())
    hidden = [p for name, p in twin.named_parameters() if ".layers." in name and p.dim() == 2]
    norms = [p for p in twin.parameters() if p.dim() == 1]
    parts = [
        torch.optim.Muon(hidden, lr=5e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([twin.model.embed_tokens.weight], lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW(norms, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for group in optimizer.param_groups:  # as a scheduler does
        group["lr"] = 5e-3
    for step in range(3):
        filled(model, step), filled(twin, step)
        optimizer.step()
        for part in parts:
            part.step()
    for one, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


def test_muons_state_survives_a_checkpoint():
    model, twin = (filled(make_model(torch.float32)) for _ in range(2))
    optimizer, other = MuonAdamW(model, **options()), MuonAdamW(twin, **options(lr=1.0))
    optimizer.step()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.load_state_dict(model.state_dict())
    for changed in (model, twin):
        filled(changed, 7)
    optimizer.step()
    other.step()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters()))
    optimizer.state.clear()
    assert not any(part.state for part in optimizer.parts)


def test_without_matrices_muon_is_refused():
    with pytest.raises(ValueError, match=r"muon is for matrices of the layers, and none is trained; use adamw"):
        MuonAdamW(torch.nn.LayerNorm(4), **options())


def test_muon_trains(tmp_path):
    arguments, muon = make_arguments(tmp_path, num_train_epochs=8), muon_factory(3e-2, (0.9, 0.95), 0.0)
    trainer, _ = make_trainer(make_model(torch.float32), arguments, make_rows(8), optimizer_cls_and_kwargs=muon)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < 0.7 * losses[0]


def test_8_bit_states_need_bitsandbytes_and_a_gpu(tmp_path, make_config, monkeypatch):
    config = make_config(tmp_path / "run", {"train.optimizer": "adamw_8bit"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.optimizer: bitsandbytes is not installed"):
        check_config(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs a GPU; use adamw, or adafactor"):
        check_config(config)
