import re

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.estimate.memory import advise_less_memory
from tests.helpers.launch import ROOT
from tests.helpers.present import needs


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


def advise(microbatch_size: int, *options: str) -> str:
    options = ("fsdp_config.activation_checkpointing=false", "precision=fp32", *options)
    config = load_train_config([str(ROOT / "yamls/pretrain/mpt-1b.yaml"), *options], {}).config
    return advise_less_memory(config, layout_of(config, 4), "cuda", microbatch_size)


def test_what_would_be_refused_is_not_advised():
    assert "offload_optimizer" in advise(1, "model.n_layers=2", "fsdp_config.mixed_precision=PURE")
    for refusing in ("optimizer.name=muon", "fsdp_config.sharding_strategy=ZERO_1"):
        assert "offload_optimizer" not in advise(1, refusing, "global_train_batch_size=32")


@needs("llmfoundry_layouts")
def test_what_a_pipeline_would_refuse_is_not_advised():
    stages = "pp_config.pipeline_parallel_degree=4"
    assert "device_train_microbatch_size: 2 (" in advise(4, stages, "global_train_batch_size=20")
    rounds = "pp_config.schedule=interleaved"
    assert "microbatch" not in advise(4, stages, "global_train_batch_size=18", rounds)
    counted = (stages, "global_train_batch_size=32", "pp_config.num_microbatches=8")
    assert "pp_config.num_microbatches: 16 (" in advise(4, *counted, "device_train_microbatch_size=null")
    assert "offload_optimizer" not in advise(1, stages, "global_train_batch_size=32")
