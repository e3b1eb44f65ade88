"""The decoding kernels in Triton's own interpreter, on the CPU; run by `test_decoding` in a process of its own.

Attention against plain torch in float64, the draw against `chance.draw`. The interpreter knows no bfloat16 dot product:
everything here is float32, the rest is for a GPU.
"""

import math

import pytest
import torch
import transformers

from deftune.evaluation import triton_decoding
from deftune.evaluation.chance import derive_key, draw, exponentials
from deftune.evaluation.decoding import LanguageModel
from deftune.evaluation.direct import Direct
from deftune.evaluation.slots import SlotCache, attend_plain, step_logits
from deftune.losses.triton_backend import interpreted

assert interpreted(), "TRITON_INTERPRET=1 must be set before triton is imported"

CASES = {
    "smollm2": {"heads": 3, "group": 3, "width": 64},  # one key head for 3 query heads, padded to 16
    "one head": {"heads": 1, "group": 1, "width": 16},
    "ragged": {"heads": 2, "group": 5, "width": 24},  # neither the group nor the width is a power of 2
    "wide": {"heads": 1, "group": 17, "width": 32},  # one past 16 query heads
    "window": {"heads": 2, "group": 2, "width": 32, "window": 20},
    "window of one": {"heads": 2, "group": 2, "width": 32, "window": 1},
    "softcap": {"heads": 2, "group": 2, "width": 32, "softcap": 3.0},
}
LENGTHS = [0, 1, 15, 16, 17, 40, 63]  # empty, around a block, and the last place of the room


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_is_that_of_torch(case, monkeypatch):
    monkeypatch.setattr(triton_decoding, "TILE_BYTES", 16 * 64 * 4)  # blocks of 16 entries: several a slot
    heads, group, width = case["heads"], case["group"], case["width"]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows, slots, room = len(LENGTHS), len(LENGTHS) + 2, 64
    lengths = torch.tensor([*LENGTHS, 5, 5])
    # as a model has them: the heads of a token side by side, seen the other way round
    query = 2 * normal(rows, 1, heads * group, width).transpose(1, 2)[:, :, 0]
    key, value = (normal(rows, 1, heads, width).transpose(1, 2)[:, :, 0] for _ in range(2))
    keys, values = normal(slots, heads, room, width), normal(slots, heads, room, width)
    for row, length in enumerate(LENGTHS):  # what lies beyond a slot's length must not matter
        keys[row, :, length:], values[row, :, length:] = math.nan, math.nan
    options = {"scale": width**-0.5, "window": case.get("window"), "softcap": case.get("softcap")}
    wide = [part.double() for part in (query, key, value, keys.nan_to_num(0.0), values.nan_to_num(0.0))]
    expected = attend_plain(*wide, lengths, **options)
    out = triton_decoding.attend(query, key, value, keys, values, lengths, **options)
    assert (out - expected).abs().max() < 2e-6 * expected.abs().max() + 1e-6
    for row, length in enumerate(LENGTHS):
        assert torch.equal(keys[row, :, length], key[row]) and torch.equal(values[row, :, length], value[row])
    assert torch.equal(keys.nan_to_num(0.0).double(), wide[3]) and torch.equal(values.nan_to_num(0.0).double(), wide[4])


def keys_of(number: int) -> torch.Tensor:
    keys = [derive_key(0, "item", sample) for sample in range(number)]
    return torch.tensor([[key >> 32, key & 0xFFFFFFFF] for key in keys]).to(torch.int32)


@pytest.mark.parametrize("temperatures", [(0.0,), (0.7,), (1.0,), (0.0, 0.5, 1.0)], ids=str)
def test_tokens_are_those_of_the_plain_draw(temperatures, monkeypatch):
    """The same hash, so the same tokens, but where the best two are as close as float32 rounds their scores."""
    monkeypatch.setattr(triton_decoding, "DRAW_BLOCK", 512)  # two of them, the second ragged
    rows, size = 150, 1003
    logits = 3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(0))
    keys, steps = keys_of(rows), torch.arange(rows, dtype=torch.int32) * 7919
    each = torch.tensor(temperatures).repeat(rows // len(temperatures))
    token, finite = triton_decoding.draw(logits, keys, steps, each)
    expected, close = draw(logits, exponentials(keys, steps, size) if any(temperatures) else None, each, 1.0, 1e-5)
    assert torch.equal(token[each == 0], logits.argmax(-1)[each == 0])
    assert finite.all() and token.unique().numel() > 75
    assert torch.equal(token[~close], expected[~close])
    assert int((token != expected).sum()) <= int(close.sum()) <= 2


def test_the_exponentials_themselves(monkeypatch):
    """Logits that are all alike leave the choice to the noise: 60 draws of 2^16 reach where E is 1e-6 and less."""
    monkeypatch.setattr(triton_decoding, "DRAW_BLOCK", 2**15)
    rows, size = 60, 2**16
    keys, steps = keys_of(rows), torch.zeros(rows, dtype=torch.int32)
    token, _ = triton_decoding.draw(torch.zeros(rows, size), keys, steps, torch.ones(rows))
    noise = exponentials(keys, steps, size)
    assert torch.equal(token, noise.argmin(-1))


def test_equals_and_what_is_not_finite():
    logits = torch.zeros(6, 5000)
    logits[1, 4000] = logits[1, 300] = 1.0
    logits[2, 4321] = math.nan
    logits[3, 17] = math.inf
    logits[4] = -math.inf
    logits[5, :] = -math.inf
    logits[5, 4999] = -3.0
    for temperature in (0.0, 1.0):
        steps, temperatures = torch.zeros(6, dtype=torch.int32), torch.full((6,), temperature)
        token, finite = triton_decoding.draw(logits, keys_of(6), steps, temperatures)
        assert finite.tolist() == [True, True, False, False, False, True]
        assert token[5] == 4999 and (token < 5000).all()
        if temperature == 0:
            assert token[:2].tolist() == [0, 300]


def test_logits_of_a_wider_tensor():
    logits = torch.randn(7, 2, 50, generator=torch.Generator().manual_seed(0))
    token, _ = triton_decoding.draw(logits[:, -1], keys_of(7), torch.zeros(7, dtype=torch.int32), torch.zeros(7))
    assert torch.equal(token, logits[:, -1].argmax(-1))


# Llama and Qwen2 written out -----------------------------------------------------------------------------------------

MODELS = {
    "llama": (transformers.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama, scaled rotation": (
        transformers.LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen2": (transformers.Qwen2ForCausalLM, {"num_key_value_heads": 1}),
}


@pytest.fixture(params=MODELS)
def model(request):
    cls, more = MODELS[request.param]
    options = {
        "vocab_size": 101, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 64, **more,
    }  # fmt: skip
    torch.manual_seed(0)
    model = cls(cls.config_class(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # biases and norms too
    return model


@torch.no_grad()
def test_the_model_written_out_is_the_model(model):
    assert Direct.takes(model)
    direct, network = Direct(model), LanguageModel(model, end_ids=set(), pad_id=0, tie_margin=0.0)
    ids = torch.randint(0, 101, (4, 9), generator=torch.Generator().manual_seed(0))
    read = transformers.DynamicCache()
    model(ids, past_key_values=read, use_cache=True)
    found = direct.read(ids)
    assert len(found) == len(read.layers) == 2
    for layer, (keys, values) in zip(read.layers, found):
        assert (keys - layer.keys).abs().max() < 1e-5 * layer.keys.abs().max()
        assert (values - layer.values).abs().max() < 1e-5 * layer.values.abs().max()
    heads = found[0][0].shape[1]
    caches = [SlotCache([(heads, 8)] * 2, 5, 20, torch.float32, torch.device("cpu")) for _ in range(2)]
    tokens = torch.tensor([3, 50, 100, 7])
    for cache in caches:
        for layer, (keys, values) in enumerate(found):
            cache.keys[layer][:4, :, :9], cache.values[layer][:4, :, :9] = keys, values
        cache.lengths[:4] = torch.tensor([9, 4, 0, 8])
    for _ in range(3):
        expected = step_logits(network, tokens, caches[0])
        logits = direct.step(tokens, caches[1])
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
        for mine, its in zip(caches[1].tensors(), caches[0].tensors()):
            assert (mine - its).abs().max() < 1e-5 * its.abs().max()
        tokens = expected.argmax(-1)
        for cache in caches:
            cache.lengths[:4] += 1


def test_what_is_not_written_out_goes_through_the_model(model):
    assert not Direct.takes(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )))  # fmt: skip
    hook = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert not Direct.takes(model)
    hook.remove()
    assert Direct.takes(model)
    model.model.norm.forward = lambda x: x
    assert not Direct.takes(model)
    del model.model.norm.forward
    model.config.hidden_act = "gelu"
    assert not Direct.takes(model)


def test_rounding_is_that_of_the_modules():
    """In float16, which the interpreter knows: the same bits as the modules of transformers."""
    from transformers.models.llama import modeling_llama as llama

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).half()

    x, more = normal(12, 40), normal(12, 40)
    norm = llama.LlamaRMSNorm(40, eps=1e-5).half()
    norm.weight.data = normal(40)
    total, out = triton_decoding.add_norm(x, more, norm.weight.data, 1e-5)
    assert torch.equal(total, x + more)
    assert (out - norm(x + more)).abs().max() <= 2e-3 * out.abs().max()  # the mean is summed in another order
    first, alone = triton_decoding.add_norm(x, None, norm.weight.data, 1e-5)
    assert torch.equal(first, x) and (alone - norm(x)).abs().max() <= 2e-3 * alone.abs().max()
    q, cos, sin = normal(12, 3, 8), normal(4, 8), normal(4, 8)
    expected, _ = llama.apply_rotary_pos_emb(q, q, cos.repeat(3, 1), sin.repeat(3, 1))
    assert torch.equal(triton_decoding.rotate(q, cos, sin), expected)
    gate, up = normal(12, 72), normal(12, 72)
    difference = triton_decoding.silu_times(gate, up) - torch.nn.functional.silu(gate) * up
    assert difference.abs().max() <= 2e-3 and (difference == 0).float().mean() > 0.99
