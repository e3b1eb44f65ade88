"""The samplers: a transformers model in this process (`local`), a server (`endpoint`) and vLLM (`vllm_engine`).

An answer depends on the model, the prompt, the settings, the seed, the item's id and the number of the sample; not on
the order of the items, nor on the other items.

**Random numbers.** A token is drawn by the Gumbel-max rule: argmax over the vocabulary of ``z_v / T - log E_v``, where
E_v is exponential with mean 1. E_v is a hash of (key, step, v), and key is SHA-256 of (seed, item id, sample), so there
is no state. Two models with the same seed share E_v: their answers to an item are correlated, and the difference of
their scores is less noisy.

**Batches.** Kernels and their summation orders depend on shapes, so a batch rounds differently than a single row. On
SmolLM2 in float32 on a CPU, logits differ by up to 1e-4 (batches of 1, 8 and 32, padded or not), which could change a
token whose best two candidates are closer than that. Where they are closer than ``tie_margin``, `TransformersSampler`
computes the row again without batch, padding or cache. As long as rounding moves the distance by less than
``tie_margin``, answers are the same for every ``batch_size`` and order, on one machine with one number of threads.

Not guaranteed: the same answers on other devices, thread counts or versions of torch; in bfloat16 and float16, where
rounding moves logits by tenths and the margin is off by default; and from `EndpointSampler` and `VllmSampler`, which
only pass the seed on.
"""

from deftune.evaluation.chance import derive_key
from deftune.evaluation.endpoint import EndpointSampler
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.sampler import Output, Prompt, Sampler, SamplerError, Settings
from deftune.evaluation.vllm_engine import VllmSampler

__all__ = [
    "EndpointSampler",
    "Output",
    "Prompt",
    "Sampler",
    "SamplerError",
    "Settings",
    "TransformersSampler",
    "VllmSampler",
    "derive_key",
]
