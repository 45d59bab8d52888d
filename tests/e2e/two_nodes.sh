#!/usr/bin/env bash
# Two hosts on one machine: tests/e2e/two_nodes.sh FOLDER COMMAND...
#
# Makes two hosts, each with a network interface, a name, processes, a /tmp and shared memory of its own, on one network;
# starts a Ray cluster on them by scripts/ray_cluster.sh; runs COMMAND on the first. All is gone when it ends.
# FOLDER and the repository are what the two share. Needs no root: user namespaces. ON_HOSTB, of the environment, are
# variables that Ray gets on the second host only.
set -euo pipefail
if [[ ${1:-} != --inside ]]; then
  exec unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc "$0" --inside "$@"
fi
folder=$2
shift 2
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
declare -A holder

for name in hosta hostb; do
  # shellcheck disable=SC2016
  unshare --net --mount --uts --pid --ipc --fork --kill-child --mount-proc bash -c '
    set -e
    name=$1 root=$2 folder=$3
    hostname "$name"
    mount -t tmpfs shm /dev/shm
    printf "127.0.0.1 localhost\n10.77.0.1 hosta\n10.77.0.2 hostb\n" >"$folder/hosts"
    mount --bind "$folder/hosts" /etc/hosts
    mkdir -p "$folder/tmp-$name"
    mount -t tmpfs tmp "$folder/tmp-$name"
    for shared in "$root" "$folder"; do # where they are under /tmp, which is hidden next
      [[ $shared == /tmp/* ]] || continue
      mkdir -p "$folder/tmp-$name/${shared#/tmp/}"
      mount --bind "$shared" "$folder/tmp-$name/${shared#/tmp/}"
    done
    mount --rbind "$folder/tmp-$name" /tmp
    exec sleep infinity' host "$name" "$root" "$folder" &
  until holder[$name]=$(pgrep -P $! -x sleep); do sleep 0.1; done
done
on() { local pid=${holder[$1]}; shift; nsenter --target "$pid" --net --mount --uts --pid --ipc --wd="$root" -- "$@"; }

# By a switch: with one cable between them, the death of a host would take the other's interface, and its address, along.
ip link add switch type bridge
ip link set switch up
for side in a b; do
  ip link add "to_$side" type veth peer name "v$side" netns "${holder[host$side]}"
  ip link set "to_$side" master switch up
  on "host$side" ip link set lo up
  on "host$side" ip link set "v$side" up
  on "host$side" ip addr add "10.77.0.$([[ $side == a ]] && echo 1 || echo 2)/24" dev "v$side"
done

export CLUSTER=cpu_2x1 NODES="hosta hostb" RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
on hosta scripts/ray_cluster.sh head &
head=$!
# shellcheck disable=SC2086
on hostb env ${ON_HOSTB:-} scripts/ray_cluster.sh worker 10.77.0.1
wait "$head"
RAY_ADDRESS=10.77.0.1:6379 on hosta "$@"
