# The server on a CPU. From the folder of the clone, with a model folder mounted at /model:
#   docker build -f scripts/deploy/server.Dockerfile -t vanilla-transformer-server .
#   docker run -p 5000:5000 -v "$PWD/runs/mine:/model:ro" vanilla-transformer-server --model en-de=/model
# In production with its digest: --build-arg BASE=python:3.11-slim@sha256:…
ARG BASE=python:3.11-slim
FROM ${BASE}

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY hf_vanilla_transformer hf_vanilla_transformer
COPY scripts scripts
# the installation builds the C functions for --dtype int8, and the server needs no compiler
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && pip install --no-cache-dir -c scripts/constraints.txt ".[serve,convert]" \
      --extra-index-url https://download.pytorch.org/whl/cpu \
    && apt-get purge -y --auto-remove gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 translator
USER 1000
ENV HF_HUB_OFFLINE=1
EXPOSE 5000
# exec form: the server gets SIGTERM, and answers what has arrived
ENTRYPOINT ["vanilla-transformer", "serve", "--host", "0.0.0.0"]
CMD ["--model", "/model"]
