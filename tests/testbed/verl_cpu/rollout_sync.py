"""`rollout.mode=sync` of verl 0.6.1: verl's own HFRollout, which nothing in its registry reaches, with a model of its
own that takes the trainer's weights."""

import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.hf_rollout import HFRollout


class HFCpuRollout(HFRollout):
    def __init__(self, config, model_config, device_mesh):
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh
        self.module = AutoModelForCausalLM.from_config(model_config.hf_config, dtype=torch.float32)

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    @torch.no_grad()
    async def update_weights(self, weights, **kwargs):
        state = self.module.state_dict()
        sent = set()
        for name, tensor in weights:
            state[name].copy_(tensor)
            sent.add(name)
        assert sent >= set(state) - {"lm_head.weight"}, set(state) - sent
