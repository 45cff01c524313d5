#!/usr/bin/env bash
# An environment for tests, from nothing: setup.sh VENV [LOCK]. Real verl on a CPU and the test tools.
# LOCK is a file of locks/: `test` (the default: verl 0.9.1, also the clients of the backends) or `verl-0.8`.
# Does nothing if VENV is there and was made from the same lock. Needs Python 3.11, gcc and readelf.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$1
packages=$root/locks/${2:-test}.txt
lock=$(cat "$root/locks/overrides.txt" "$packages" "$here/make_cuda_stubs.py" "$root/pyproject.toml" | sha256sum | cut -c1-16)
[ "$(cat "$venv/.lock" 2>/dev/null)" != "$lock" ] || exit 0
python=${PYTHON:-python3.11}
command -v "$python" > /dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  { echo "Python 3.11 is needed for the tested environment; set PYTHON to one (the package itself runs on 3.10 to 3.12)" >&2; exit 1; }
say() { echo "environment: $1 ($SECONDS s)"; }

say "making $venv"
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/pip" install -q --disable-pip-version-check "$(grep '^uv==' "$packages")"
say "installing $(grep -c '==' "$packages") packages"
uv=("$venv/bin/uv" pip install -q --python "$venv/bin/python")
for attempt in 1 2 3; do  # an index can be slow to answer
  if "${uv[@]}" --override "$root/locks/overrides.txt" -r "$packages"; then break; fi
  [ "$attempt" != 3 ] || exit 1
done
"${uv[@]}" --no-deps --no-build-isolation -e "$root"
say "making stand-ins for the CUDA libraries"
"$venv/bin/python" "$here/make_cuda_stubs.py" "$venv"/lib/python3*/site-packages > /dev/null
say "compiling what a run imports"
# uv writes no bytecode, and some machines set PYTHONDONTWRITEBYTECODE: each process of a run would compile torch anew.
env -u PYTHONDONTWRITEBYTECODE PYTHONPATH="$here" VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu.register \
  "$venv/bin/python" -W ignore - << 'PY' > /dev/null 2>&1
import importlib

for module in """verl.trainer.main_ppo verl.trainer.main_ppo_v0 verl.trainer.ppo.v1 verl.experimental.agent_loop
verl.experimental.agent_loop.tool_agent_loop verl.experimental.reward_loop verl_cpu.rollout verl.workers.engine_workers
transformers.models.qwen2.modeling_qwen2 tensorboard transfer_queue mlflow.server verl_otel.bridges.server
ray._private.runtime_env.context ray.dashboard.agent ray._private.log_monitor ray.autoscaler._private.monitor""".split():
    try:
        importlib.import_module(module)
    except Exception:
        pass
PY
echo "$lock" > "$venv/.lock"
say "ready"
