#!/bin/bash
# A training run on Slurm: sbatch recipes/launch/slurm.sh RECIPE key=value ...
#
# Change the lines below for your cluster. Before its time is over, and when a node is lost, the job goes back into the
# queue and then on from its newest checkpoint, also on another number of nodes.
#SBATCH --job-name=draftsmith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
MAIN_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
GPUS=${SLURM_GPUS_ON_NODE:-8}
export MAIN_NODE GPUS
stopped=

srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file recipes/launch/two_machines.yaml \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * GPUS))" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MAIN_NODE" --main_process_port "${MAIN_PORT:-29500}" -m draftsmith.train "$@"' draftsmith "$@" &
training=$!
trap 'stopped=yes; kill -TERM "$training"' TERM  # it saves a checkpoint and leaves

code=0
while kill -0 "$training" 2>/dev/null; do  # a signal ends a wait, too
    wait "$training"
    code=$?
done
if [ -n "$stopped" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
