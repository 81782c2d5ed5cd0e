import re

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.plan.advice import advise_less_memory
from tests.helpers.launch import ROOT


def test_what_helps_most_is_named_first():
    files = [str(ROOT / "yamls/pretrain/mpt-7b.yaml")]
    options = ["fsdp_config.sharding_strategy=NO_SHARD", "fsdp_config.activation_checkpointing=false"]
    config = load_train_config([*files, *options], {}).config
    text = advise_less_memory(config, layout_of(config, 8), "cuda")
    assert re.sub(r"[\d.]+ GiB", "n GiB", text) == (
        "; what helps most: fsdp_config.sharding_strategy: FULL_SHARD (saves about n GiB), "
        "fsdp_config.offload_optimizer: true (saves about n GiB), "
        "fsdp_config.activation_checkpointing: true (saves about n GiB)"
    )
    best, *others = map(float, re.findall(r"([\d.]+) GiB", text))
    assert best > others[0] > others[1] > 0
    config = load_train_config(files, {}).config
    assert "FULL_SHARD" not in advise_less_memory(config, layout_of(config, 8), "cpu")
