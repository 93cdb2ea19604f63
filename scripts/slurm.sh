#!/usr/bin/env bash
#SBATCH --job-name=coati-rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:INT@120
# Start one run on all nodes of a SLURM job: Ray's head and the driver on the first node, a Ray worker on each other one. Submit it from
# the repository's root, which needs the same path on all nodes, with its .venv; arguments are passed to rl_example.py, whose exit code
# is the job's:
#   sbatch --nodes=4 --gpus-per-node=8 scripts/slurm.sh -m /shared/model -d /shared/train.jsonl -t 16 -i 16
set -euo pipefail

repository="${SLURM_SUBMIT_DIR:?start it with sbatch, from the root of the repository}"
nodes="${SLURM_JOB_NUM_NODES:?}"
deadline_s="${COATI_CLUSTER_TIMEOUT_S:-300}" # for all nodes to join
port="${COATI_RAY_PORT:-6379}"
bin="$repository/.venv/bin"
cd -- "$repository"

say() { printf '[slurm] %s\n' "$*"; }
[[ -x "$bin/ray" && -f rl_example.py ]] || {
    say "$repository has no .venv with Ray, or no rl_example.py: call sbatch in the root of the repository" >&2
    exit 2
}

# Create a token for this job; the cluster refuses connections without it. Job steps inherit these variables.
private="$repository/runs/.slurm-${SLURM_JOB_ID:?}-${SLURM_RESTART_COUNT:-0}"
mkdir -p "$repository/runs"
mkdir -m 700 "$private"
steps=()
# shellcheck disable=SC2317,SC2329  # the trap calls it
finish() {
    trap - EXIT
    if ((${#steps[@]})); then
        kill "${steps[@]}" 2>/dev/null || true
        wait "${steps[@]}" 2>/dev/null || true
    fi
    rm -rf -- "$private"
}
trap finish EXIT
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$private/token")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$private/token" RAY_USAGE_STATS_ENABLED=0

mapfile -t names < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
head_node="${names[0]:?scontrol named no node}"
address="${COATI_HEAD_ADDRESS:-$("$bin/python" -c 'import ray; print(ray.util.get_node_ip_address())')}" # this script runs there

start_ray() { # number of nodes, option that selects them, options of ray start
    local count="$1" selection="$2"
    shift 2
    srun --overlap --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" \
        --cpu-bind=none "$selection" "$bin/ray" start --block --disable-usage-stats "$@" >>"$private/ray.log" 2>&1 &
    steps+=("$!")
}

wait_for_nodes() { # number
    local end=$((SECONDS + deadline_s)) alive=0
    while ((SECONDS < end)); do
        alive="$("$bin/python" -c 'import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="CRITICAL")
print(sum(node["Alive"] for node in ray.nodes()))' "$address:$port" 2>/dev/null || echo 0)"
        ((alive >= $1)) && return
        kill -0 "${steps[-1]}" 2>/dev/null || break # it has ended, and its nodes will not join
        sleep 2
    done
    say "$alive of $1 nodes joined the Ray cluster at $address:$port within $deadline_s s; the last lines of its log:" >&2
    tail -n 20 "$private/ray.log" >&2
    return 1
}

say "head $head_node ($address:$port), $nodes node(s)"
start_ray 1 "--nodelist=$head_node" --head --node-ip-address="$address" --port="$port" --include-dashboard=false
wait_for_nodes 1
if ((nodes > 1)); then
    start_ray "$((nodes - 1))" "--exclude=$head_node" --address="$address:$port"
    wait_for_nodes "$nodes"
fi

"$bin/python" rl_example.py --master_address "$address:$port" --interrupt-grace-s 110 "$@" &
driver=$!
# SLURM sends INT two minutes before the time limit, and TERM when the job is cancelled.
trap 'kill -INT "$driver" 2>/dev/null || true' INT TERM
status=0
while kill -0 "$driver" 2>/dev/null; do
    status=0
    wait "$driver" || status=$?
done
say "rl_example.py ended with exit code $status"
exit "$status"
