"""Commands of the planner. The core reads this at every start, so it imports nothing heavy."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={
        "plan": "llmfoundry_planner.commands:plan_command",
        "fabric": "llmfoundry_planner.commands:fabric_command",
        "rehearse": "llmfoundry_planner.commands:rehearse_command",
    },
    examples=(
        "plan mpt-7b --hardware h100 --devices 64,128 --price 2.5",
        "fabric --nodes 1200 --storage 200",
        "rehearse mpt-7b h100-8 --devices 16",
    ),
)
