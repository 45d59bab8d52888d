#!/usr/bin/env bash
# ERC: DeepSeek-R1-Distill-Qwen-7B with ERC-DAPO; the paper has 8 nodes (NNODES=8).
# How it is started and what it takes from the environment: scripts/launch.sh.
exec "$(dirname "$(realpath "$0")")/launch.sh" erc/erc_dapo "$@"
