# The server on a CPU. From the folder of the clone, with a model folder mounted at /model:
#   docker build -f scripts/deploy/server.Dockerfile -t vanilla-transformer-server .
#   docker run -p 5000:5000 -v "$PWD/runs/mine:/model:ro" vanilla-transformer-server --model en-de=/model
FROM python:3.11-slim

# the compiler is for --dtype int8
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY hf_vanilla_transformer hf_vanilla_transformer
COPY scripts scripts
RUN pip install --no-cache-dir -c scripts/constraints.txt ".[serve,convert]" \
      --extra-index-url https://download.pytorch.org/whl/cpu \
    && useradd --create-home --uid 1000 translator
USER 1000
ENV HF_HUB_OFFLINE=1
EXPOSE 5000
# exec form: the server gets SIGTERM, and answers what has arrived
ENTRYPOINT ["vanilla-transformer", "serve", "--host", "0.0.0.0"]
CMD ["--model", "/model"]
