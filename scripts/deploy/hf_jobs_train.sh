#!/usr/bin/env bash
# Train on Hugging Face's machines: bash scripts/deploy/hf_jobs_train.sh IMAGE BUCKET RECIPE [FLAG…]
# IMAGE is training.Dockerfile in a registry. The run stays in the bucket, from which a further attempt resumes.
set -euo pipefail
image=$1 bucket=$2 recipe=$3
exec hf jobs run --flavor "${FLAVOR:-a10g-small}" --timeout 12h --attempts 3 --secrets HF_TOKEN \
  --volume "hf://buckets/$bucket:/runs" "$image" \
  vanilla-transformer train "$recipe" --output_dir /runs/run --resume_from_checkpoint auto "${@:4}"
