#!/usr/bin/env bash
# Trainer and rollouter are actors that go on by themselves, with a queue of samples between them; new weights after
# every 2 steps of 4 samples. STEPS counts versions of the weights. Same environment as run_ppo.sh.
here=$(cd "$(dirname "$0")" && pwd)
export RANKS=${RANKS:-1}
export LOGICAL_GPUS=$((RANKS + 1)) LOGICAL_CPUS=64 ENTRY=verl.experimental.fully_async_policy.fully_async_main
exec "$here/run_ppo.sh" grpo \
  actor_rollout_ref.hybrid_engine=False \
  data.train_batch_size=0 data.gen_batch_size=1 \
  actor_rollout_ref.actor.ppo_mini_batch_size=4 \
  async_training.trigger_parameter_sync_step=2 async_training.staleness_threshold=0.5 \
  rollout.nnodes=1 rollout.n_gpus_per_node=1 rollout.total_rollout_steps=$((8 * ${STEPS:-3})) \
  actor_rollout_ref.rollout.checkpoint_engine.backend=ray_store \
  actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu.checkpoint_engine \
  "$@"
