#!/usr/bin/env bash
# Translate a file in 64 shards: sbatch scripts/deploy/slurm_translate.sh MODEL INPUT OUTPUT [FLAG…]
# SHARDS=128 sbatch --array=1-128 … for another number. A lost shard runs again alone: sbatch --array=40 …
# Then, as a job that starts after them:
#   sbatch --dependency=afterok:JOB --wrap "vanilla-transformer merge --output OUTPUT"
#SBATCH --job-name=translate
#SBATCH --array=1-64%16
#SBATCH --cpus-per-task=1
#SBATCH --mem-per-cpu=2G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
model=$1 input=$2 output=$3

# A shard that is killed, or runs again on a different node, continues after its last chunk.
srun vanilla-transformer translate --model "$model" --input "$input" --output "$output" \
  --shard "$SLURM_ARRAY_TASK_ID/${SHARDS:-64}" "${@:4}"
