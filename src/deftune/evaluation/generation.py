"""Answers from a model: one small interface, three ways to run it, and a generator of chance that can be repeated.

`Sampler.sample` yields each answer as it is finished, in any order: a transformers model here (`local`), a server
(`endpoint`), or vLLM (`vllm_engine`). What answer (item, sample) is follows from the model, the prompt, the settings
and the seed alone; not from the order of the items, nor from which of them are asked.

**The chance.** A token is drawn by the Gumbel-max rule: argmax over the vocabulary of ``z_v / T - log E_v``, where E_v
is exponential with mean 1. E_v is a hash of (key, step, v), and key is SHA-256 of (seed, item id, sample): no state, so
that nothing drawn elsewhere can move it. Two models asked with the same seed meet the same E_v, which makes their
answers to the same item go together, and the difference between them less noisy.

**Batches.** Arithmetic in a batch rounds differently than alone: kernels and their summation orders depend on shapes.
On SmolLM2 in float32 on a CPU logits move by up to 1e-4 (batch 1, 8, 32, padded or not). A token therefore could change
where the best two candidates are closer than that. `TransformersSampler` watches the distance, and where it is below
``tie_margin`` it asks the model again for that row alone, without padding or cache: one shape, one answer, whatever
the batch. So as long as rounding moves a distance by less than ``tie_margin``, the answers are the same for every
``batch_size``, order and company, on one machine with one number of threads.

Not guaranteed: the same answers across devices, thread counts, or versions of torch; anything in bfloat16 or float16,
where rounding moves logits by tenths and no margin is on by default; an `EndpointSampler` or `VllmSampler`, which pass
the seed on and can promise no more than the server does.
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
