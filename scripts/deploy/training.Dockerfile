# Training and translation on GPUs. From the folder of the clone:
#   docker build -f scripts/deploy/training.Dockerfile -t vanilla-transformer .
#   docker run --gpus all --ipc host -v "$PWD:/data" vanilla-transformer train small_corpus --train /data/train.tsv
FROM python:3.11-slim

# the compiler is for torch.compile and --dtype int8
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY hf_vanilla_transformer hf_vanilla_transformer
COPY scripts scripts
RUN pip install --no-cache-dir -c scripts/constraints.txt ".[convert,plot,ray]"
WORKDIR /data
ENTRYPOINT ["vanilla-transformer"]
CMD ["--help"]
