#!/usr/bin/env bash
# The next batch is generated while the trainer works on this one. One rollout server of its own. Same environment as
# run_ppo.sh.
here=$(cd "$(dirname "$0")" && pwd)
export RANKS=${RANKS:-1}
export LOGICAL_GPUS=$((RANKS + 1)) LOGICAL_CPUS=48 ENTRY=verl.experimental.one_step_off_policy.main_ppo
exec "$here/run_ppo.sh" grpo \
  hydra.searchpath='[pkg://verl.trainer.config]' \
  actor_rollout_ref.hybrid_engine=False \
  rollout.nnodes=1 rollout.n_gpus_per_node=1 \
  actor_rollout_ref.rollout.checkpoint_engine.backend=ray_store \
  actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_cpu.checkpoint_engine \
  "$@"
