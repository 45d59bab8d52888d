#!/usr/bin/env bash
# DPPO: Qwen3-8B-Base with binary TV.
# How it is started and what it takes from the environment: scripts/launch.sh.
exec "$(dirname "$(realpath "$0")")/launch.sh" dppo/dense "$@"
