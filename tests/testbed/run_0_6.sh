#!/usr/bin/env bash
# verl 0.6.1: legacy FSDP workers, the rollout inside the worker (rollout.mode=sync). Same environment as run_ppo.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
adv=$1; shift
: "${PYTHON:=python}" "${ASSETS:?folder made by make_assets.py}" "${OUT:?an output folder}" "${RANKS:=2}" "${STEPS:=4}"
mkdir -p "$OUT"
: "${RAY_TMP:=$OUT/ray}"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
export VERL_USE_EXTERNAL_MODULES=verl_cpu.register_0_6
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export RAY_DEDUP_LOGS=0 RAY_USAGE_STATS_ENABLED=0 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
ray=()
if [ -n "${ZYGOTE:-}" ]; then
  export ZYGOTE ZYGOTE_PYTHON=$PYTHON
  PYTHON=$here/fork/zpython
  ray=(++ray_kwargs.ray_init.runtime_env.py_executable="$PYTHON")
fi
exec ${LAUNCH:-} "$PYTHON" -m verl.trainer.main_ppo \
  algorithm.adv_estimator="$adv" \
  data.train_files="$ASSETS/train.parquet" data.val_files="$ASSETS/test.parquet" \
  data.train_batch_size=8 data.max_prompt_length=48 data.max_response_length=16 \
  data.dataloader_num_workers=0 \
  actor_rollout_ref.model.path="$ASSETS/model" \
  actor_rollout_ref.model.use_remove_padding=False \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  ++actor_rollout_ref.model.override_config.attn_implementation=sdpa \
  actor_rollout_ref.actor.strategy=fsdp2 ++actor_rollout_ref.ref.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-3 \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_torch_compile=False \
  ++actor_rollout_ref.actor.fsdp_config.use_torch_compile=False \
  ++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32 \
  ++actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 \
  critic.model.path="$ASSETS/model" critic.strategy=fsdp2 \
  critic.model.use_remove_padding=False critic.model.enable_gradient_checkpointing=False \
  ++critic.model.override_config.attn_implementation=sdpa \
  critic.ppo_micro_batch_size_per_gpu=8 \
  ++critic.model.fsdp_config.mixed_precision.param_dtype=fp32 \
  actor_rollout_ref.rollout.name=hf_cpu actor_rollout_ref.rollout.mode=sync \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.dtype=float32 \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  custom_reward_function.path="$here/reward.py" \
  trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node="$RANKS" \
  trainer.logger='[console]' trainer.project_name=cpu trainer.experiment_name="$adv" \
  trainer.default_local_dir="$OUT/ckpt" trainer.resume_mode=disable \
  trainer.val_before_train=True trainer.test_freq=2 trainer.save_freq=-1 \
  trainer.total_training_steps="$STEPS" trainer.total_epochs=100 \
  ray_kwargs.ray_init.num_cpus=16 \
  ++ray_kwargs.ray_init.num_gpus="$RANKS" \
  ++ray_kwargs.ray_init.resources.cpu="$RANKS" \
  ++ray_kwargs.ray_init.object_store_memory=500000000 \
  ++ray_kwargs.ray_init._temp_dir="$RAY_TMP" \
  ++ray_kwargs.ray_init.include_dashboard=False \
  "${ray[@]}" \
  hydra.run.dir="$OUT/hydra" \
  "$@"
