#!/bin/bash
# Runs one rank of a job, and ends with status 0 only if the run has reached its last step.
#
#     rank.sh CONFIG.toml [further arguments of `dflop train`]
#
# A run that is asked to stop (SIGTERM) saves a checkpoint and ends with status 0. A scheduler would take that
# for the end of the job; this script makes it a failure of rank 0, after which the scheduler starts the job again.
set -u

dflop train "$@" --resume &
rank=$!
trap 'kill -TERM "$rank"' TERM INT
# A signal interrupts the first wait; the second one returns the status of the rank.
wait "$rank" || wait "$rank"
status=$?
if [ "$status" -ne 0 ]; then
    exit "$status"
fi
if [ "${RANK:-${OMPI_COMM_WORLD_RANK:-${SLURM_PROCID:-0}}}" -eq 0 ]; then
    dflop train "$@" --resume --check | grep -q 'is the end of the run' || exit 1
fi
