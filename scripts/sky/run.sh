#!/usr/bin/env bash
# What each node of a SkyPilot job runs: composer on all its devices, and our exit codes for SkyPilot to go by.
#   RUN=yamls/pretrain/mpt-1b.yaml SAVE_FOLDER=s3://bucket/{run_name} OPTIONS='key=value …' bash scripts/sky/run.sh
# shellcheck disable=SC2206
set -uo pipefail

# Whoever ends the job tells this shell; the ranks must hear of it, and have the time to save.
launcher="" asked=0 told=0
leave() {
    asked=1
    if [[ -n $launcher ]]; then
        told=1
        kill -TERM "$launcher" 2> /dev/null
    fi
}
trap leave TERM INT

ranks=${SKYPILOT_NUM_GPUS_PER_NODE:-1}
((ranks > 0)) || ranks=1 # CPUs alone
node=${SKYPILOT_NODE_RANK:-0}
place=(
    -n "$ranks" --world_size $((ranks * ${SKYPILOT_NUM_NODES:-1})) --base_rank $((ranks * node)) --node_rank "$node"
    --master_addr "$(head -n 1 <<< "${SKYPILOT_NODE_IPS:-127.0.0.1}")" --master_port 29400
)
arguments=("$RUN" hardware=auto autoresume=true "save_folder=$SAVE_FOLDER" ${OPTIONS:-})

started=$(date +%s)
((asked)) && exit 75 # nothing has begun
composer "${place[@]}" scripts/train.py "${arguments[@]}" &
launcher=$!
((asked && !told)) && leave
wait "$launcher"
code=$?
while kill -0 "$launcher" 2> /dev/null; do # a signal has ended `wait` alone
    wait "$launcher"
    code=$?
done

# A rank that a signal has ended hides 75 (134: NCCL's watchdog aborts those whose peers have left); status.json tells.
if ((code > 128)) && python3 scripts/slurm/was_preempted.py "$started" "${arguments[@]}"; then
    code=75
fi
((asked && code == 143)) && code=75 # composer had not begun to listen
exit "$code"
