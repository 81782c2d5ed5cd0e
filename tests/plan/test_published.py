"""Every microbatch that was published fits, says the estimate. `tests/rehearse` runs the tightest of them."""

from llmfoundry_lite.config.layout import layout_of
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_lite.models.flops import count_parameters
from llmfoundry_lite.plan.memory import estimate_training_memory
from llmfoundry_lite.plan.search import usable_bytes
from tests.helpers.published import published


def test_no_published_microbatch_is_said_to_be_out_of_memory():
    rows = published()
    assert len(rows) == 144
    sizes = set()
    for row in rows:
        config = load_train_config(row.arguments).config
        estimate = estimate_training_memory(config, layout_of(config, row.num_devices, 8))
        assert estimate.total_bytes <= usable_bytes(ACCELERATORS[row.device]), row.name
        sizes.add(count_parameters(config.model))
    assert {64_862_437_376, 29_975_214_080} <= sizes, "as published, with biases"
