"""verl 0.7 and 0.8: no platform registry yet. verl takes the device "cpu" by itself where it finds no accelerator, and
calls functions that torch.cpu does not have; and it wants flash-attn's unpad functions, of which it has versions in
plain torch, written for NPU."""

from verl_cpu.device import extend_torch_cpu


def apply():
    extend_torch_cpu()
    import verl.utils.attention_utils as attention
    from verl.utils import npu_flash_attn_utils as npu

    functions = npu.index_first_axis, npu.pad_input, npu.rearrange, npu.unpad_input
    attention._get_attention_functions = lambda: functions
