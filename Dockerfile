# syntax=docker/dockerfile:1
# docker build -t trustregion .                     for GPUs, with CUDA kernels compiled ahead of time
# docker build -t trustregion:cpu --target cpu .    the CPU set, no GPU anywhere
# How to run them: docs/docker.md

FROM python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d AS cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# libnuma1: vLLM's CPU kernels link to it.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 make && rm -rf /var/lib/apt/lists/*
ARG UID=1000
RUN useradd --create-home --non-unique --uid "$UID" trustregion && install -d -o trustregion /trustregion
WORKDIR /trustregion
COPY --chown=trustregion . .
USER $UID
ENV PATH=/trustregion/.venv/bin:$PATH
# The last thing an installation does is to ask the doctor, who wants more than a build's 64 MB of shared memory.
RUN --mount=type=tmpfs,target=/dev/shm make setup DEVICE=cpu
HEALTHCHECK --interval=10m --timeout=2m --start-period=5m CMD ["python", "-m", "trustregion.doctor"]
CMD ["make", "quickstart"]

# verl's own image beside the releases that verl 0.9.1 pins (requirements/gpu.txt): CUDA 13.0, torch 2.11.0, vLLM 0.24.0 and
# flash-attn 2.8.3, on Python 3.12, without verl itself. `vllm024.latest` is the same but moves.
FROM verlai/verl:vllm024.dev2@sha256:b867883b0dd011363e69ab2ab344922a28c5bd0409e2a324e3ee70fb27ca7543 AS gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
ARG UID=1000
RUN useradd --create-home --non-unique --uid "$UID" trustregion && install -d -o trustregion /trustregion
WORKDIR /trustregion
COPY --chown=trustregion . .
USER $UID
ENV PATH=/trustregion/.venv/bin:$PATH
# What the image has is seen from the virtual environment and not installed again.
RUN python3 -m venv --without-pip --system-site-packages .venv
# The GPUs that kernels are compiled for: a build has none to ask. +PTX: later ones compile theirs when they start.
RUN --mount=type=tmpfs,target=/dev/shm PYTHON=python3 TRUSTREGION_BUILD=cuda TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX" \
    make setup DEVICE=cuda
HEALTHCHECK --interval=10m --timeout=2m --start-period=5m CMD ["python", "-m", "trustregion.doctor"]
CMD ["make", "quickstart"]
