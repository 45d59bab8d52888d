#!/usr/bin/env bash
# BandPO: DeepSeek-R1-Distill-Qwen-7B with Band-KL at delta .05; MODEL=qwen2.5-7b-instruct for a plain Qwen.
# How it is started and what it takes from the environment: scripts/launch.sh.
exec "$(dirname "$(realpath "$0")")/launch.sh" bandpo/band_kl "$@"
