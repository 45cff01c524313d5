"""A checkpoint engine, from the trainer to rollout servers of their own, that goes through Ray's object store: verl's own
backends need a GPU or RDMA. Extension point: `checkpoint_engine.custom_backend_module=verl_cpu.checkpoint_engine`."""

import asyncio

import ray
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry


@ray.remote(num_cpus=0)
class Mailbox:
    """Holds the weights of one sync until every rollout rank has taken them."""

    def __init__(self):
        self.weights, self.arrived = None, asyncio.Event()

    async def put(self, weights):
        self.weights = weights
        self.arrived.set()

    async def get(self):
        await self.arrived.wait()
        return self.weights


@CheckpointEngineRegistry.register("ray_store")
class RayStoreCheckpointEngine(CheckpointEngine):
    def __init__(self, bucket_size, is_master=False):
        self.is_master = is_master
        self.mailbox = None

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        mailbox = Mailbox.remote()  # a new one for each sync
        return {"mailbox": [mailbox] * actor_wg_world_size}, {"mailbox": [mailbox] * rollout_world_size}

    def prepare(self):
        return {}

    def init_process_group(self, mailbox):
        self.mailbox = mailbox

    def finalize(self):
        self.mailbox = None

    async def send_weights(self, weights, global_steps=None):
        named = [(name, tensor.detach().cpu()) for name, tensor in weights]  # each is an all-gather of all ranks
        if not self.is_master:
            return {}
        await self.mailbox.put.remote(named)
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in named)
        # As verl's delta engines report it.
        return {"checkpoint_engine/payload_mbytes": size / 2**20, "checkpoint_engine/flushes": 1}

    async def receive_weights(self, global_steps=None):
        for name, tensor in await self.mailbox.get.remote():
            yield name, tensor
