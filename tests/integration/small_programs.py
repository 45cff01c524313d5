"""How verl's programs use Ray besides worker groups, in small.

A trainer that is an async actor and travels by value, an agent-loop worker (a subclass of verl's),
verl's reward worker.

Run by test_small_programs.py under `opentelemetry-instrument`, with each version of verl. Argument: Ray's folder.
"""

import asyncio
import importlib.metadata
import os
import sys

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop import agent_loop
from verl.utils.profiler import marked_timer, simple_timer
from verl.utils.tracking import Tracking

VERL = importlib.metadata.version("verl")
WITH_REWARD_LOOP = VERL >= "0.7.1"
STEP = 3

base = agent_loop.AgentLoopWorkerBase if VERL < "0.7.1" else agent_loop.AgentLoopWorker


class SmallAgentLoopWorker(base):
    """Two trajectories, each of two turns with a tool call between them, and the reward where verl computes it."""

    def __init__(self, reward_worker):
        self.reward_worker = reward_worker

    async def generate_sequences(self):
        await asyncio.gather(*(self.run(sample) for sample in range(2)))

    def one_sample(self):
        """As verl hands it to the reward worker."""
        return DataProto.from_single_dict({"responses": torch.zeros(1, 1), "data_source": np.array(["small"], object)})

    async def run(self, sample):
        with agent_loop.rollout_trace_attr(
            step=STEP, sample_index=sample, rollout_n=0, name="agent_loop", validate=False
        ):
            with simple_timer("generate_sequences", {}):
                await asyncio.sleep(0.02)
            with simple_timer("tool_calls", {}):
                await asyncio.sleep(0.01)
            with simple_timer("generate_sequences", {}):
                await asyncio.sleep(0.02)
            if self.reward_worker is not None:
                await self.reward_worker.compute_score.remote(self.one_sample())


if WITH_REWARD_LOOP:
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    class SmallRewardLoopWorker(RewardLoopWorker):
        """verl's own `compute_score`, with a reward manager that takes time and nothing else."""

        def __init__(self):
            custom = {"path": "given", "name": "given"}
            self.config = OmegaConf.create(
                {"reward": {"custom_reward_function": custom, "reward_model": {"enable": False}}}
            )
            self.reward_manager = self

        async def run_single(self, data):
            await asyncio.sleep(0.01)
            return {"reward_score": 1.0}


@ray.remote(num_cpus=0, max_concurrency=10)
class SmallTaskRunner:
    """An actor whose class exists in the program only, with a coroutine for the training loop."""

    async def run(self, agent):
        tracking = Tracking("project", "experiment", default_backend=["console"], config={"trainer": {"nnodes": 1}})
        timing = {}
        with marked_timer("step", timing):
            with marked_timer("gen", timing):
                await agent.generate_sequences.remote()
            with marked_timer("update_actor", timing):
                await asyncio.sleep(0.02)
        tracking.log(data={"actor/loss": 0.1234567890123, "timing_s/step": timing["step"]}, step=STEP)
        return timing

    def flush(self):
        from verl_otel import telemetry

        telemetry.current().finish()


def main() -> None:
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100_000_000,
        _temp_dir=sys.argv[1],
        logging_level="ERROR",
        runtime_env={"py_executable": os.environ["ZYGOTE_LAUNCHER"]} if "ZYGOTE_LAUNCHER" in os.environ else None,
    )
    reward = ray.remote(SmallRewardLoopWorker).options(num_cpus=0).remote() if WITH_REWARD_LOOP else None
    agent = ray.remote(SmallAgentLoopWorker).options(num_cpus=0).remote(reward)
    trainer = SmallTaskRunner.remote()
    for _ in range(2):  # in the first step the reward worker is asked whether it takes the context
        timing = ray.get(trainer.run.remote(agent))
    print("timing", timing)
    ray.get(trainer.flush.remote())

    from verl_otel.hooks import ray_actors

    ray_actors.flush_actors(5)


if __name__ == "__main__":
    main()
