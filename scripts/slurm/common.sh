# The common part of the batch scripts here, which source it. It needs the arguments of scripts/train.py as "$@" and
#   srun_options   an array of further options for srun, perhaps empty
#   container      an array of the words before python3, perhaps empty
# shellcheck shell=bash disable=SC2154

set -uo pipefail
# A signal that reaches this shell must not end it before its ranks: bash handles it when srun has returned. SLURM sends
# USR1 to the ranks alone. TERM comes here too, and is `scancel`, or SLURM's own preemption, which requeues by itself.
# By which SLURM's commands find this job and no other: an array's last task has the number of the whole array.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
cancelled=
trap 'cancelled=yes' TERM
trap : USR1

# Without a launcher that kills after 30 s, a save may take longer; SLURM signals 120 s before the end.
options=(autoresume=true preemption_grace_seconds=60)
end=${SLURM_JOB_END_TIME:-} # SLURM 22.05 does not set it
if [[ -z $end ]]; then
    end=$(squeue --noheader --jobs="$job" --format=%e 2> /dev/null)
    # `date` takes nothing for midnight, and a job without a limit has no end.
    if [[ $end == [0-9]* ]]; then end=$(date --date="$end" +%s); else end=; fi
fi
if [[ -n $end ]]; then
    # If the signal does not come, leave 90 s before the job's end.
    options+=("max_wall_time=$((end - $(date +%s) - 90))s")
fi

# Since 22.05 srun does not read sbatch's --cpus-per-task from SLURM_CPUS_PER_TASK any more.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

# A job that was requeued on fewer nodes still has the number of tasks of its submission, which srun would ask for.
if ((${SLURM_NTASKS:-0} > ${SLURM_NNODES:-1} * ${SLURM_NTASKS_PER_NODE:-${SLURM_NTASKS:-0}})); then
    unset SLURM_NTASKS SLURM_NPROCS
fi

# `sbatch --export=NONE`, some sites' default, would keep this shell's environment from the ranks.
export SLURM_EXPORT_ENV=ALL

# One task for each device, with all devices visible to every task. The rendezvous is on rank 0's node: ranks/rank.py
# reads srun's variables. Once a rank has left, the others have two minutes, so that the first one to leave with 75
# does not get the others killed. (Bash before 4.4 treats an empty array as unset.)
started=$(date +%s)
srun --kill-on-bad-exit=0 --wait=120 ${srun_options[@]+"${srun_options[@]}"} \
    ${container[@]+"${container[@]}"} python3 scripts/train.py "${options[@]}" "$@"
code=$?

# 75: preempted, run me again. If a signal ended a rank, the code is another (134: NCCL's watchdog aborts ranks whose peers
# have left), and status.json tells. It also tells of 1 whether a fault that may pass ended a launch that had saved before.
# Any other code is the end; docs/moving-a-run.md says what each means.
preempted=
if [[ $code == 75 ]]; then
    preempted=yes
elif ((code == 1 || code > 128)); then
    srun --nodes=1 --ntasks=1 ${srun_options[@]+"${srun_options[@]}"} ${container[@]+"${container[@]}"} \
        python3 scripts/slurm/was_preempted.py "$started" "${options[@]}" "$@" && preempted=yes
fi
if [[ -n $preempted && -z $cancelled && ! -e "STOP-$job" ]]; then
    scontrol requeue "$job"
fi
exit "$code"
