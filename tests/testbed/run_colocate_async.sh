#!/usr/bin/env bash
# Asynchronous mode on the trainer's own ranks. Same environment as run_ppo.sh.
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/run_ppo.sh" grpo trainer.v1.trainer_mode=colocate_async \
  trainer.v1.sampler.custom_sampler.path="$here/fast_sampler.py" \
  trainer.v1.sampler.custom_sampler.name=FastReplayBufferAsync \
  "$@"
