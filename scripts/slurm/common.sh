# What the batch scripts here have in common; they source it. It needs the arguments of scripts/train.py as "$@" and
#   srun_options   an array of further options for srun, perhaps empty
#   container      an array of the words before python3, perhaps empty
# shellcheck shell=bash disable=SC2154

set -uo pipefail
# A signal that reaches this shell must not end it before its ranks: bash handles it when srun has returned. SLURM sends
# USR1 to the ranks alone. TERM comes here too, and is `scancel`, or SLURM's own preemption, which requeues by itself.
cancelled=
trap 'cancelled=yes' TERM
trap : USR1

# Without a launcher that kills after 30 s, a save may take longer; SLURM signals 120 s before the end.
options=(autoresume=true preemption_grace_seconds=60)
if [[ -n "${SLURM_JOB_END_TIME:-}" ]]; then
    # Should the signal not come: leave 90 s before the job's end.
    options+=("max_wall_time=$((SLURM_JOB_END_TIME - $(date +%s) - 90))s")
fi

# One task for each device, all of them visible to every task. The rendezvous is on the first node of the step:
# ranks/rank.py reads srun's variables. When a rank has left the others have two minutes; the first to leave with 75 must
# not have the others killed. (Bash before 4.4 takes an empty array for one that is not set.)
started=$(date +%s)
srun --kill-on-bad-exit=0 --wait=120 ${srun_options[@]+"${srun_options[@]}"} \
    ${container[@]+"${container[@]}"} python3 scripts/train.py "${options[@]}" "$@"
code=$?

# 75: preempted, run me again. A rank that a signal has ended hides that (134: NCCL's watchdog aborts those whose peers
# have left); then status.json tells. Anything else is the end: 0 done, 2 the configuration or the data, 1 a bug.
preempted=
if [[ $code == 75 ]]; then
    preempted=yes
elif ((code > 128)); then
    srun --nodes=1 --ntasks=1 ${srun_options[@]+"${srun_options[@]}"} ${container[@]+"${container[@]}"} \
        python3 scripts/slurm/was_preempted.py "$started" "${options[@]}" "$@" && preempted=yes
fi
if [[ -n $preempted && -z $cancelled && ! -e "STOP-$SLURM_JOB_ID" ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
