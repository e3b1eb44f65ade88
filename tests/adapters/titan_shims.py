"""A CPU in place of the GPU that torchtitan expects; call `stand_in` before torchtitan is imported."""

import types

import torch
import torch._utils
import torch.nn.functional as F


def stand_in():
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan falls back to cuda
    properties = types.SimpleNamespace(total_memory=2**34)
    shims = {
        "get_device_name": lambda *_: "cpu", "set_device": lambda *_: None, "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None, "get_device_properties": lambda *_: properties,
        "memory_stats": lambda *_: {}, "memory_allocated": lambda *_: 0,
    }  # fmt: skip
    for name, shim in shims.items():
        setattr(torch.cpu, name, shim)
    import torchtitan.distributed.fsdp as fsdp
    import torchtitan.distributed.utils as utils
    import torchtitan.models.common.attention as attention
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
        """flex_attention has no backward on a CPU."""
        mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        return out, types.SimpleNamespace(lse=None)

    attention.FlexAttention._compiled_flex_attn = staticmethod(dense)
    for name in [name for name in dir(attention) if "create_block_mask" in name]:
        setattr(attention, name, create_block_mask)
    utils.set_pg_timeouts = lambda *args, **more: None
    divide = fsdp.disable_fsdp_gradient_division

    def without_premultiplied_sums(model):
        """gloo has no PREMUL_SUM."""
        divide(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = without_premultiplied_sums
