#!/usr/bin/env bash
# Starts one of configs/experiment, or goes on with it when it was started before:
#
#   scripts/launch.sh EXPERIMENT [--dry-run] [any Hydra override ...]
#
# --dry-run prints the command and the whole configuration, checks them, and starts nothing. From the environment:
#   NNODES, NGPUS_PER_NODE   1 and 8; 2, 4 or 8 nodes of 8 too, once a Ray cluster is up on them (RAY_ADDRESS, or this node's)
#   MODEL, MODEL_PATH        one of configs/model instead of the experiment's; a folder instead of the hub's name
#   RUN_DIR                  where everything goes, checkpoints too: runs/EXPERIMENT[-MODEL]
#   PYTHON                   .venv/bin/python
# Metrics go to wandb, which keeps them in the run's folder where its server cannot be reached (WANDB_MODE decides otherwise).
set -euo pipefail
experiment=${1:?usage: scripts/launch.sh EXPERIMENT [--dry-run] [override ...]}
shift
[[ -z ${RUN_DIR:-} ]] || RUN_DIR=$(realpath -m "$RUN_DIR") # of the folder that this was started in
[[ ! -d ${MODEL_PATH:-} ]] || MODEL_PATH=$(realpath "$MODEL_PATH")
cd "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
name=${experiment//\//-}${MODEL:+-$MODEL}

for_hydra() { # its grammar gives a meaning to , = ( ) [ ] { } ' and more; quotes take all but interpolations
  [[ ${!1} != *'${'* ]] || { echo "launch: $1 = ${!1}: Hydra would replace what begins with \${. Choose another path." >&2; return 2; }
  [[ ${!1} =~ ^[A-Za-z0-9_./:@%+-]+$ ]] && echo "${!1}" || echo "'${!1//\'/\\\'}'"
}

arguments=("experiment=$experiment" "name=$name" "trainer.logger=[console,file,wandb]" trainer.resume_mode=auto)
[[ " $* " == *" cluster="* ]] || arguments+=("cluster=${NNODES:-1}x${NGPUS_PER_NODE:-8}")
[[ -z ${MODEL:-} ]] || arguments+=("model=$MODEL")
[[ -z ${MODEL_PATH:-} ]] || arguments+=("model.path=$(for_hydra MODEL_PATH)")
[[ -z ${RUN_DIR:-} ]] || arguments+=("run_dir=$(for_hydra RUN_DIR)")
exec "$python" -m recipes.train "${arguments[@]}" "$@"
