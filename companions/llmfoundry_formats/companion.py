"""What foreign formats add to the core."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    commands={"init": "llmfoundry_formats.commands:init"},
    examples=("init my-texts/ --hours 8", "init data/mine --size 125m"),
    readers={
        "checkpoints of Composer and DCP": "llmfoundry_formats.checkpoints:import_pickled",
        "causal models of other types": "llmfoundry_formats.plain_models:open_plain",
        "pytorch_model.bin": "llmfoundry_formats.pickles:read_weights_file",
        "hf:// data sets of tasks": "llmfoundry_formats.hub_tasks:read_hub",
        "logs of lm-eval and Inspect": "llmfoundry_formats.logs:load_logs",
    },
)
