"""Parts that start runs, keep them going and watch them, for the core."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={
        "init": "llmfoundry_ops.commands:init",
        "train -n": "llmfoundry_ops.commands:train_ranks",
        "watch": "llmfoundry_ops.commands:watch_command",
        "relay": "llmfoundry_ops.commands:relay_command",
    },
    examples=("init my-texts/ --hours 8", "init data/mine --size 125m", "watch runs/mpt-1b", "relay relay.yaml"),
    readers={"runs that are still written": "llmfoundry_ops.runs:list_runs"},
    builders={
        "additions to a report": "llmfoundry_ops.report:Launches",
        "energy counters": "llmfoundry_ops.energy:build_meter",
        "callbacks.hf_checkpointer": "llmfoundry_ops.after_saves:build_hf_checkpointer",
        "callbacks.generate_callback": "llmfoundry_ops.after_saves:build_generate",
        "callbacks.early_stopper": "llmfoundry_ops.stoppers:EarlyStopper",
        "callbacks.kill_loss_spike": "llmfoundry_ops.stoppers:KillLossSpike",
    },
)
