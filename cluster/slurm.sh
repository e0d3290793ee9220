#!/bin/bash
# sbatch cluster/slurm.sh run jobs/quickstart.toml          (tiny: -s train.num_rounds=2)
# sbatch cluster/slurm.sh resume runs/quickstart
#
# Starts a Ray on all nodes of the allocation, runs `rayfed` with these arguments on the first node, and cleans up.
# Submit from the root of the checkout, which has .venv and is on storage that all nodes share.
# Stop with `scancel --batch --signal=TERM JOB`: plain scancel would end Ray at the same moment as the driver.
#SBATCH --job-name=rayfed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log

set -u
usual=$(umask)

: "${SLURM_JOB_ID:?"start this with sbatch, as its first lines say"}"
limit=${JOIN_LIMIT:-180}                           # seconds in which all nodes must join
temporary=/tmp/rayfed-$SLURM_JOB_ID                # on each node; short: the path of a socket has at most 107 bytes
private=$PWD/.rayfed-$SLURM_JOB_ID                 # on shared storage, for the token
# Two jobs may share a node: each job has its own ten ports, below the kernel's ephemeral ports. Ray chooses the others.
port=$((10000 + SLURM_JOB_ID % 2000 * 10))
node_ports="--node-manager-port=0 --object-manager-port=0 --min-worker-port=0 --max-worker-port=0"
node_ports+=" --dashboard-agent-listen-port=$((port + 2)) --dashboard-agent-grpc-port=$((port + 3))"
node_ports+=" --metrics-export-port=$((port + 4)) --runtime-env-agent-port=$((port + 5))"

export PATH=$PWD/.venv/bin:$PATH
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # newer versions of Slurm do not pass it from the job to its steps
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$private/token

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${HEAD_ADDRESS:-$(hostname -I | cut -d " " -f 1)}  # HEAD_ADDRESS: if there are several, the address that all nodes reach
driver="" steps=() stopped=0

stop() {
    stopped=1
    [[ -z $driver ]] || kill -TERM "$driver" 2>/dev/null  # writes a checkpoint and ends
}

# End everything that was started here, also if the driver failed or a node never joined.
clean() {
    local status=$?
    trap "" TERM
    kill -TERM "${steps[@]}" 2>/dev/null
    for _ in {1..40}; do
        kill -0 "${steps[@]}" 2>/dev/null || break  # none is left
        sleep 0.5
    done
    kill -KILL "${steps[@]}" 2>/dev/null
    srun --overlap --ntasks="${#nodes[@]}" --ntasks-per-node=1 rm -rf "$temporary"
    rm -rf "$private"
    exit "$status"
}
trap stop TERM
trap clean EXIT

# on NODE OPTION...: start Ray on that node, in the background. /tmp is everybody's: a folder of another user is refused.
# Ray opens its own folder, the one below, to everybody.
on() {
    local node=$1
    shift
    # shellcheck disable=SC2016,SC2086  # the inner shell expands; node_ports has several words
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
        bash -c '{ mkdir -m 700 "$0" 2>/dev/null || [[ -O $0 && -d $0 && ! -L $0 ]] ||
            { echo "error: $0 cannot be made, or is not our folder" >&2; exit 1; }; } &&
            exec ray start "$@" --block' "$temporary" \
        --temp-dir="$temporary/ray" --num-cpus="$SRUN_CPUS_PER_TASK" $node_ports --disable-usage-stats "$@" &
    steps+=($!)
}

# joined NUMBER: return when that many nodes have joined; otherwise end the script
joined() {
    timeout --kill-after=5 "$limit" python - "$1" <<'PY' &
import sys, time
import ray

ray.init(logging_level="ERROR", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(0.5)
PY
    local joining=$!
    wait -n "$joining" "${steps[@]}"
    local status=$?
    if kill -0 "$joining" 2>/dev/null; then  # a signal came, or Ray ended on a node
        steps+=("$joining")
        ((stopped == 0)) && echo "error: Ray ended on a node, see above" >&2 && exit 1
    elif ((status != 0)); then
        echo "error: not all of ${nodes[*]} had joined after $limit s: can they reach $RAY_ADDRESS?" \
            "(HEAD_ADDRESS sets another)" >&2
        exit 1
    fi
    ((stopped == 0)) || exit 143
}

umask 077  # for the token only; the driver's files get the usual modes
mkdir "$private" && python -c "import secrets; print(secrets.token_hex(32), end='')" >"$private/token" || exit 1
umask "$usual"

export RAY_ADDRESS=$address:$port
on "${nodes[0]}" --head --node-ip-address="$address" --port="$port" \
    --dashboard-host=127.0.0.1 --dashboard-port=$((port + 1)) --ray-client-server-port=$((port + 6))
joined 1  # a worker gives up if the head starts too slowly
for node in "${nodes[@]:1}"; do
    on "$node" --address="$RAY_ADDRESS"
done
joined "${#nodes[@]}"  # rayfed counts the nodes when it starts
echo "Ray runs on ${#nodes[@]} nodes"

rayfed "$@" &
driver=$!
wait "$driver"
while kill -0 "$driver" 2>/dev/null; do  # a signal interrupted `wait`, but the driver is still running
    wait "$driver"
done
wait "$driver"
status=$?
driver=""
exit "$status"
