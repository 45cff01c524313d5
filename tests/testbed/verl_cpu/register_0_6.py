"""verl 0.6.1: legacy FSDP workers with the rollout inside the worker. VERL_USE_EXTERNAL_MODULES=verl_cpu.register_0_6

Two patches of torch.distributed, for what verl asks of gloo and only NCCL does: the backend "cpu:gloo,cpu:gloo", and a
0-d tensor gathered into tensors of one element. Two of verl, for what it asks of every critic and reference policy
whatever the configuration says: flash-attn, and pinned memory, which is an accelerator's.
"""

import torch.distributed as dist
import verl.utils.fsdp_utils
import verl.utils.model
from transformers import AutoModelForTokenClassification

from verl_cpu.device import extend_torch_cpu

extend_torch_cpu()
_init, _gather = dist.init_process_group, dist.all_gather


def init_process_group(backend=None, *args, **kwargs):
    duplicate = backend is not None and backend.startswith("cpu:gloo,cpu:")
    return _init("cpu:gloo" if duplicate else backend, *args, **kwargs)


def all_gather(tensor_list, tensor, *args, **kwargs):
    if tensor.dim() == 0 and tensor_list and tensor_list[0].dim() == 1:
        tensor = tensor.reshape(1)
    return _gather(tensor_list, tensor, *args, **kwargs)


dist.init_process_group, dist.all_gather = init_process_group, all_gather



def load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code):
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


verl.utils.model.load_valuehead_model = load_valuehead_model
verl.utils.fsdp_utils.CPUOffloadPolicy = lambda pin_memory: None  # the weights are on the CPU already

from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # noqa: E402

_ROLLOUT_REGISTRY[("hf_cpu", "sync")] = "verl_cpu.rollout_sync.HFCpuRollout"
