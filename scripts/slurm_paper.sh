#!/usr/bin/env bash
# The paper's table as a SLURM array, one GPU for each part:
#
#   sbatch scripts/slurm_paper.sh --data imagenet_r=PATH --data cifar100=PATH --weights FOLDER [more options]
#   sbatch --array=3,5 scripts/slurm_paper.sh …        these parts again
#   vbm-ptm study studies/paper --published published/paper_table --collect [the same options]   the table at any time
#
# Submit from the repository's folder, with its environment active. A part that runs out of time is stopped between two
# steps, keeps its finished tasks, and is put back into the queue; finished runs are never repeated.
#SBATCH --job-name=paper-table
#SBATCH --array=1-8
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
#SBATCH --open-mode=append
#SBATCH --output=slurm-paper-%a.log
set -uo pipefail

# The number of parts is fixed: SLURM_ARRAY_TASK_COUNT would be 2 for --array=3,5 and cut the list anew.
parts=${PARTS:-8}
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # compute nodes often have no network

# srun, because --signal reaches the job's steps and not this shell.
srun python -m vbm_ptm study studies/paper --published published/paper_table \
    --shard "$SLURM_ARRAY_TASK_ID/$parts" "$@"
code=$?
if [ "$code" = 143 ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
