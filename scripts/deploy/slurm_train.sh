#!/usr/bin/env bash
# Train on two nodes: sbatch scripts/deploy/slurm_train.sh RECIPE --output_dir RUN --train FILE… [FLAG…]
# RUN lies on a file system that the nodes share. GPUs: add --gpus-per-node, and set GPUS to the same number.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
set -uo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((15000 + SLURM_JOB_ID % 15000)) # jobs that share a node must not meet at one port

# Each node has 30 seconds to save, which ends the step. The job then returns to the queue and resumes.
stopped=
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # otherwise a node that is new cannot join a run that goes on
trap 'stopped=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1 TERM
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${GPUS:-1}" \
  --max-restarts 2 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:$port" \
  --module vanilla_transformer_cli train "$@" --resume_from_checkpoint auto &
wait $!
status=$?
if [ -n "$stopped" ]; then
  wait
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
