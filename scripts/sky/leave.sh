#!/usr/bin/env bash
# Asks the runs of this machine to save and leave, and waits until they have: SkyPilot's hook before it takes the machine.
cd "$(dirname "$0")/../.." || exit 0
is_running() { grep -q '"status": "running"' "$1" 2> /dev/null; }
for status in runs/*/status.json runs/*/*/status.json; do # of an island, one folder further down
    is_running "$status" && touch "$(dirname "$status")/STOP"
done
for status in runs/*/status.json runs/*/*/status.json; do
    while is_running "$status"; do
        sleep 1
    done
done
