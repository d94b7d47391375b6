#!/bin/bash
# Trains on several nodes, one process for each GPU:   sbatch slurm.sh python train.py
#
# One for each GPU, because JAX gives a process under SLURM the one device with its SLURM_LOCALID. Hence all GPUs of the
# node are visible to each process (--gpus-per-node, not --gpus-per-task, which hides the others and renumbers).
#
# train.py calls zerojax.processes.initialize() first, and exits with 75 after it has saved because of SIGTERM.

#SBATCH --job-name=zerojax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120

set -uo pipefail

SAVED_AND_ENDED=75 # EX_TEMPFAIL of sysexits.h: start me again
AFTER_THE_FIRST_S=120 # what the others have after one process has ended; --kill-on-bad-exit would cut off their save

srun --wait="$AFTER_THE_FIRST_S" "$@"
code=$?

if ((code == SAVED_AND_ENDED)); then
    scontrol requeue "$SLURM_JOB_ID" # the job keeps its number and its place in the accounting, and starts again
fi
exit "$code"
