#!/usr/bin/env bash
# One run, or one study, on all GPUs of several nodes:
#
#   sbatch scripts/slurm_ranks.sh train --dataset cifar100 --learner slca --preset paper --output runs/mine --resume
#   sbatch --nodes=1 scripts/slurm_ranks.sh study studies/views_and_consistency --set dataset.path=PATH
#
# Submit with the environment active. A step is cut over the ranks and stays the same step, so that batch size and
# rates need no change. --resume does no harm to a run that is new.
#SBATCH --job-name=vbm-ptm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
set -euo pipefail

gpus=${GPUS_PER_NODE:-4}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node=${nodes%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 20000)) # jobs on one node must not meet each other
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# One launcher for each node; what stands in '…' is evaluated there, where SLURM_NODEID is the node's own.
# shellcheck disable=SC2016
srun bash -c 'exec accelerate launch --multi_gpu --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" \
    --num_processes "$((SLURM_NNODES * '"$gpus"'))" --main_process_ip '"$first_node"' --main_process_port '"$port"' \
    -m vbm_ptm "$@"' ranks "$@"
