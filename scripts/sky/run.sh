#!/usr/bin/env bash
# Runs on each node of a SkyPilot job: starts composer on all devices, and exits with the codes that SkyPilot acts on.
#   RUN=yamls/pretrain/mpt-1b.yaml SAVE_FOLDER=s3://bucket/{run_name} OPTIONS='key=value …' bash scripts/sky/run.sh
# shellcheck disable=SC2206
set -uo pipefail

# A signal that ends the job reaches only this shell, so it is passed on, and the ranks get the time to save.
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
((ranks > 0)) || ranks=1 # only CPUs
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
while kill -0 "$launcher" 2> /dev/null; do # a signal ends `wait`, not the launcher
    wait "$launcher"
    code=$?
done

# If a signal ended a rank, the launcher's code is not 75 (134: NCCL's watchdog aborts ranks whose peers have left). Then
# status.json tells. It also tells of 1 whether a fault that may pass ended a launch that had saved before.
if ((code == 1 || code > 128)) && python3 scripts/slurm/was_preempted.py "$started" "${arguments[@]}"; then
    code=75
fi
((asked && code == 143)) && code=75 # composer had not begun to listen
exit "$code"
