#!/usr/bin/env bash
# Asks the runs of this machine to save and leave, and waits until they have: SkyPilot's hook before it takes the machine.
cd "$(dirname "$0")/../.." || exit 0
for status in runs/*/status.json; do
    [[ -e $status ]] && touch "$(dirname "$status")/STOP"
done
for status in runs/*/status.json; do
    while grep -q '"status": "running"' "$status" 2> /dev/null; do
        sleep 1
    done
done
