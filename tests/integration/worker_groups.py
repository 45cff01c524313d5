"""Worker groups of both kinds on a local Ray cluster, called from a stage, as verl's trainers do it.

Run by test_ray.py under `opentelemetry-instrument`. Argument: Ray's temporary folder.
"""

import asyncio
import os
import sys

import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.utils.profiler import marked_timer


class ActorWorker(Worker):
    """A role of a fused WorkerDict."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_actor(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def update_weights(self):
        await asyncio.sleep(0.01)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail(self, rank):
        if self.rank == rank:
            raise ValueError(f"rank {rank} has no memory left")


class CriticWorker(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_critic(self):
        return self.rank


class Telling:
    """An actor of the user's own: async methods and async generators, not wrapped by us."""

    async def say(self, x):
        return x

    async def count(self, n):
        for i in range(n):
            yield i


def main() -> None:
    fork = {"py_executable": os.environ["ZYGOTE_LAUNCHER"]} if "ZYGOTE_LAUNCHER" in os.environ else {}
    ray.init(
        num_cpus=64,  # logical: a resource pool reserves ten for each rank
        include_dashboard=False,
        object_store_memory=100_000_000,
        _temp_dir=sys.argv[1],
        logging_level="ERROR",
        runtime_env={"env_vars": {"OTEL_SERVICE_NAMESPACE_OF_USER": "kept"}, **fork},
    )
    fused = create_colocated_worker_cls(
        {
            "actor_rollout": RayClassWithInitArgs(ray.remote(ActorWorker)),
            "critic": RayClassWithInitArgs(ray.remote(CriticWorker)),
        }
    )
    pool = RayResourcePool([2], use_gpu=False, name_prefix="fused")
    groups = RayWorkerGroup(pool, fused).spawn(prefix_set={"actor_rollout", "critic"})
    plain_class = RayClassWithInitArgs(ray.remote(CriticWorker))
    plain = RayWorkerGroup(RayResourcePool([2], use_gpu=False, name_prefix="plain"), plain_class)

    plain.update_critic()  # the first call asks the ranks whether they take the context
    with marked_timer("step", {}):
        with marked_timer("update_actor", {}):
            assert groups["actor_rollout"].update_actor() == [0, 1]
        with marked_timer("update_critic", {}):
            assert groups["critic"].update_critic() == [0, 1]
            assert plain.update_critic() == [0, 1]
        with marked_timer("update_weights", {}):
            assert groups["actor_rollout"].update_weights() == [0, 1]
        told = ray.remote(Telling).remote()
        with marked_timer("told", {}):
            assert ray.get(told.say.remote(3)) == 3
            assert [ray.get(item) for item in told.count.options(num_returns="streaming").remote(3)] == [0, 1, 2]
    try:
        with marked_timer("step", {}), marked_timer("reward", {}):
            ray.get(groups["actor_rollout"].fail(1))
    except ValueError as error:
        print("the trainer got:", type(error).__name__, str(error).splitlines()[-1])

    from verl_otel.hooks import ray_actors

    ray_actors.flush_actors(5)


if __name__ == "__main__":
    main()
