#!/usr/bin/env bash
# Asynchronous mode: one rollout server of its own besides the trainer's rank, which also lends its own. Same environment
# as run_ppo.sh. (actor_rollout_ref.hybrid_engine=False fails in verl 0.9.1: trainer_separate_async.py gives
# `logger.info` an argument that it does not take.)
here=$(cd "$(dirname "$0")" && pwd)
export RANKS=${RANKS:-1}
export LOGICAL_GPUS=$((RANKS + 1))
exec "$here/run_ppo.sh" grpo \
  trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1 \
  actor_rollout_ref.rollout.checkpoint_engine.backend=ray_store \
  actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu.checkpoint_engine \
  trainer.v1.sampler.custom_sampler.path="$here/fast_sampler.py" \
  trainer.v1.sampler.custom_sampler.name=FastReplayBufferAsync \
  "$@"
