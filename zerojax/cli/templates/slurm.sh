#!/bin/bash
# Trains on several nodes, with one process per GPU:   sbatch slurm.sh
#
# Under SLURM, JAX gives each process the one device whose index is its SLURM_LOCALID. All GPUs of a node must therefore
# be visible to each of its processes: use --gpus-per-node, not --gpus-per-task, which hides and renumbers them.

#SBATCH --job-name=__NAME__
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120

set -uo pipefail

RESTART=75 # EX_TEMPFAIL of sysexits.h: the processes have saved, and can be started again
GRACE_S=120 # for the other processes, after the first has ended; --kill-on-bad-exit would interrupt their saves

srun --wait="$GRACE_S" python train.py "$@"
code=$?

if ((code == RESTART)); then
    scontrol requeue "$SLURM_JOB_ID" # the job keeps its number
fi
exit "$code"
