# Training and translation on GPUs. From the folder of the clone:
#   docker build -f scripts/deploy/training.Dockerfile -t vanilla-transformer .
#   docker run --gpus all --ipc host --user "$(id -u)" -v "$PWD:/data" vanilla-transformer train small_corpus --train /data/train.tsv
# In production with its digest: --build-arg BASE=python:3.11-slim@sha256:…
ARG BASE=python:3.11-slim
FROM ${BASE}

# the compiler is for torch.compile and --dtype int8
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY hf_vanilla_transformer hf_vanilla_transformer
COPY scripts scripts
RUN pip install --no-cache-dir -c scripts/constraints.txt ".[convert,plot,ray]" \
    && useradd --create-home --uid 1000 translator
USER 1000
# any user has a name and a folder for compiled code
ENV HOME=/tmp USER=translator
WORKDIR /data
ENTRYPOINT ["vanilla-transformer"]
CMD ["--help"]
