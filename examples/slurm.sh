#!/bin/bash
# GPT-2 small with MERIT and the paper's batch on 4 nodes of 8 GPUs each: sbatch examples/slurm.sh
#
# The data and the run directory must be on a shared file system. torchrun restarts its processes when one of
# them dies (--max-restarts), and SLURM restarts the job when a node fails or the job is preempted (--requeue).
# The command is the same each time and resumes from its last checkpoint (--auto-resume).
#
#SBATCH --job-name=merit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Two minutes before the time is up every task gets SIGTERM: it saves a checkpoint and exits. torchrun allows
# its processes 30 seconds for that; if saving takes longer, the previous checkpoint is used.
#SBATCH --signal=TERM@120

set -euo pipefail

DATA=${DATA:-data/openwebtext}
OUT=${OUT:-runs/gpt2-small-merit}

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 .venv/bin/torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 8 \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$first_node:29500" \
    -m merit_optim train gpt2-small --data "$DATA" --out "$OUT" --auto-resume \
    --optimizer.name merit --batch 1024 --tokens 2000000000
