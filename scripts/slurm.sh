#!/usr/bin/env bash
# One of configs/experiment on Slurm, over all nodes of the allocation:
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/slurm.sh EXPERIMENT [any Hydra override ...]
#
# Starts Ray on each node (scripts/ray_cluster.sh), trains by scripts/launch.sh, and ends Ray when that is done or has
# failed. Two minutes before its time is up the job is put back into the queue, and goes on from its newest checkpoint
# (trainer.save_freq). What those two scripts take from the environment can be set for sbatch (MODEL_PATH, RUN_DIR,
# CLUSTER, OBJECT_STORE_GB, ...). The repository and RUN_DIR are in folders that all nodes share.
#SBATCH --job-name=trustregion
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -euo pipefail
experiment=${1:?usage: sbatch scripts/slurm.sh EXPERIMENT [override ...]}
shift
for variable in SLURM_SUBMIT_DIR SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_JOB_NODELIST; do
  [[ -n ${!variable:-} ]] || { echo "slurm: $variable is not set: submit this with sbatch, or without Slurm see scripts/ray_cluster.sh" >&2; exit 1; }
done
cd "$SLURM_SUBMIT_DIR" # Slurm runs a copy of this file
[[ -x scripts/ray_cluster.sh ]] || { echo "slurm: $PWD is not the repository's folder: submit from there" >&2; exit 1; }
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}

export NNODES=$SLURM_JOB_NUM_NODES NGPUS_PER_NODE=${NGPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
export CLUSTER=${CLUSTER:-${NNODES}x$NGPUS_PER_NODE}
export NODES RAY_ADDRESS RAY_AUTH_MODE=token RAY_AUTH_TOKEN
NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' ')
RAY_AUTH_TOKEN=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
# This script runs on the first node, which is the head.
head=${NODE_IP:-$("$python" -m recipes.ray_node "$CLUSTER" | sed -n 's/^export NODE_IP=//p')}
RAY_ADDRESS=$head:${PORT:-6379}
unset NODE_IP # each other node has its own

end() {
  trap - EXIT TERM USR1
  [[ -z ${training:-} ]] || { kill -TERM "$training" 2>/dev/null && wait "$training"; } || true
  [[ -z ${others:-} ]] || { kill -TERM "$others" 2>/dev/null && wait "$others"; } || true
  scripts/ray_cluster.sh stop
}
trap end EXIT
trap 'end; exit 143' TERM
trap 'end; scontrol requeue "$SLURM_JOB_ID"; exit 143' USR1

if ((NNODES > 1)); then
  # A step of Slurm's takes its processes with it: this one lasts as long as Ray does on its nodes.
  # shellcheck disable=SC2016
  srun --nodes=$((NNODES - 1)) --ntasks=$((NNODES - 1)) --exclude="${NODES%% *}" --cpu-bind=none --kill-on-bad-exit=0 bash -c '
    trap "scripts/ray_cluster.sh stop" EXIT
    scripts/ray_cluster.sh worker "$RAY_ADDRESS" && tail --pid="$(</tmp/trustregion-ray-$UID/pid)" -f /dev/null' &
  others=$!
fi
NODE_IP=$head scripts/ray_cluster.sh head
scripts/launch.sh "$experiment" "cluster=$CLUSTER" ray_kwargs.ray_init.address=auto ray_kwargs.ray_init.num_gpus=null "$@" &
training=$!
wait "$training" # the job's exit code
