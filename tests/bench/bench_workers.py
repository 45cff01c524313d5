"""A worker group of one rank whose method takes an argument, as verl's do, and does nothing. For hooks.py."""

import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)


def make_group(name, environment):
    """One rank, in a process with this environment. The class is made anew, so that it is wrapped as things are now."""

    class ActorWorker(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def update_actor(self, data):
            return self.rank

    fused = create_colocated_worker_cls({"actor_rollout": RayClassWithInitArgs(ray.remote(ActorWorker))})
    if environment:
        fused.update_options({"runtime_env": {"env_vars": environment}})
    pool = RayResourcePool([1], use_gpu=False, name_prefix=name)
    group = RayWorkerGroup(pool, fused).spawn(prefix_set={"actor_rollout"})["actor_rollout"]
    assert group.update_actor({"global_steps": 1}) == [0]
    return group
