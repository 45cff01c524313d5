"""verl 0.6.1: legacy FSDP workers with the rollout inside the worker. VERL_USE_EXTERNAL_MODULES=verl_cpu.register_0_6

Two patches of torch.distributed, for what verl asks of gloo and only NCCL does: the backend "cpu:gloo,cpu:gloo", and a
0-d tensor gathered into tensors of one element.
"""

import torch.distributed as dist

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

from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # noqa: E402

_ROLLOUT_REGISTRY[("hf_cpu", "sync")] = "verl_cpu.rollout_sync.HFCpuRollout"
