#!/usr/bin/env bash
# A Ray cluster for training over several nodes, each of them started by hand (scripts/slurm.sh does it on Slurm):
#
#   scripts/ray_cluster.sh head                on the first node; returns when all nodes are there
#   scripts/ray_cluster.sh worker HEAD[:PORT]  on the others
#   scripts/ray_cluster.sh status              what is up: nodes, resources, versions
#   scripts/ray_cluster.sh stop                on each node: ends what this script started there, nothing else
#
# From the environment:
#   NNODES, NGPUS_PER_NODE   1 and 8; or CLUSTER, one of configs/cluster, whose variables Ray is started with
#   NODES                    "host1 host2 ...": who is expected, so that those who did not come are named
#   NODE_IP, PORT            this node's address where there are several; the head's port, 6379
#   OBJECT_STORE_GB          the object store's size; Ray's default is 30 % of the memory, as far as /dev/shm goes
#   WAIT_SECONDS             how long to wait for others, 300
#   RAY_AUTH_TOKEN           the same on all nodes and where training is started; else that in ~/.ray/auth_token, which
#                            `head` makes where there is none
#   PYTHON                   .venv/bin/python
set -euo pipefail
self=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$self")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
cluster=${CLUSTER:-${NNODES:-1}x${NGPUS_PER_NODE:-8}}
here=/tmp/trustregion-ray-$UID # this node's Ray: pid, address, log.txt
seconds=${WAIT_SECONDS:-300}

fail() { echo "ray_cluster: $*" >&2; exit 1; }

is_up() { [[ -s $here/pid && $(tr '\0' ' ' 2>/dev/null <"/proc/$(<"$here/pid")/cmdline") == *ray.scripts.scripts* ]]; }

check_token() { # $1: what to do where there is none
  export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
  [[ $RAY_AUTH_MODE != token || -n ${RAY_AUTH_TOKEN:-} || -s ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]] || "$1"
}
make_token() { "$python" -m ray.scripts.scripts get-auth-token --generate >/dev/null 2>&1; }
no_token() { fail "no token: set RAY_AUTH_TOKEN to the head's, or copy its ~/.ray/auth_token here"; }

start() { # $1: the cluster's address; the rest: options of ray start
  local address=$1 pid
  shift
  (umask 077 && mkdir -p "$here")
  : >"$here/log.txt"
  # A session of its own: `stop` ends that session, where `ray stop` would end every Ray of this machine.
  # shellcheck disable=SC2086
  setsid "$python" -m ray.scripts.scripts start --block --disable-usage-stats --node-ip-address="$NODE_IP" \
    --node-name="$(hostname)" $RAY_START_OPTIONS ${OBJECT_STORE_GB:+--object-store-memory=$((OBJECT_STORE_GB << 30))} "$@" \
    >>"$here/log.txt" 2>&1 </dev/null &
  pid=$!
  echo "$pid" >"$here/pid"
  echo "$address" >"$here/address"
  until grep -q "Ray runtime started" "$here/log.txt"; do
    kill -0 "$pid" 2>/dev/null || { tail -n 15 "$here/log.txt" >&2; fail "Ray did not start (log: $here/log.txt)"; }
    sleep 0.2
  done
}

case ${1:-} in
head | worker)
  ! is_up || fail "Ray is up here already, as part of $(<"$here/address"). End it with scripts/ray_cluster.sh stop"
  if [[ $1 == head ]]; then
    settings=$("$python" -m recipes.ray_node "$cluster")
    eval "$settings"
    check_token make_token
    address=$NODE_IP:${PORT:-6379}
    start "$address" --head --port="${PORT:-6379}" --include-dashboard=false
    # shellcheck disable=SC2086
    "$python" -m trustregion.verl_plugin.ray_cluster wait "$address" "$NNODES" "$seconds" ${NODES:-} \
      || { "$self" stop; exit 1; }
    echo "To train on it: export RAY_ADDRESS=$address RAY_AUTH_MODE=$RAY_AUTH_MODE"
  else
    head=${2:?usage: scripts/ray_cluster.sh worker HEAD[:PORT]}
    [[ $head == *:* ]] || head=$head:${PORT:-6379}
    settings=$("$python" -m recipes.ray_node "$cluster" "${head%:*}")
    eval "$settings"
    check_token no_token
    until (: <"/dev/tcp/${head%:*}/${head##*:}") 2>/dev/null; do
      ((SECONDS < seconds)) || fail "no answer from $head in $seconds s. Is scripts/ray_cluster.sh head up there, and the port open?"
      sleep 1
    done
    start "$head" --address="$head"
    echo "$(hostname) ($NODE_IP) is part of $head"
  fi
  ;;
status)
  address=${RAY_ADDRESS:-$(cat "$here/address" 2>/dev/null || true)}
  [[ -n $address ]] || fail "no cluster was started here. Set RAY_ADDRESS to look at one"
  check_token no_token
  exec "$python" -m trustregion.verl_plugin.ray_cluster status "$address"
  ;;
stop)
  is_up || { echo "nothing to stop"; exit 0; }
  session=$(<"$here/pid")
  kill -TERM "$session"
  for ((tries = 0; tries < 50; tries++)); do
    [[ -n $(ps -o pid= -s "$session") ]] || break
    sleep 0.2
  done
  # shellcheck disable=SC2046
  kill -KILL $(ps -o pid= -s "$session") 2>/dev/null || true
  rm -f "$here/pid" "$here/address"
  ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$self" >&2; exit 2 ;;
esac
