"""The peak of memory, told from the allocator's history."""

import inspect

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather, foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.training import loss
from llmfoundry_lite.training.gradient_step import GradientStep, measure
from llmfoundry_lite.training.trainer import ParallelTrainer
from llmfoundry_planner.rehearse.measure import categorise, replay


def frames(*functions):
    """Return a stack that stands in the middle of these functions, the innermost first."""
    stack = []
    for each in map(inspect.unwrap, functions):
        lines, first = inspect.getsourcelines(each)
        stack.append({"filename": inspect.getsourcefile(each), "line": first + len(lines) // 2, "name": each.__name__})
    return stack


MODEL, OPTIMIZER = frames(MPT.forward), frames(torch.optim.AdamW.step)


def history(*events):
    """Return a history: (address, bytes, frames) is a request; an address alone is freed."""
    entries = []
    for time_us, event in enumerate(events):
        if isinstance(event, int):
            entries.append({"action": "free_requested", "addr": event, "time_us": time_us})
        else:
            addr, size, frames = event
            entries.append({"action": "alloc", "addr": addr, "size": size, "frames": frames, "time_us": time_us})
    return entries


def test_what_was_given_back_is_not_in_the_peak():
    peak = replay(history((1, 100, MODEL), 1, (2, 70, OPTIMIZER), (3, 60, MODEL)), 0)
    assert peak.at_peak_bytes == {"optimizer": 70, "activations": 60}
    assert peak.peak_at.startswith("llmfoundry_lite/models/mpt.py:")


def test_a_peak_before_the_first_batch_does_not_count_and_what_it_leaves_does():
    peak = replay(history((1, 30, OPTIMIZER), (2, 500, MODEL), 2, (3, 40, MODEL)), 3)
    assert peak.at_peak_bytes == {"optimizer": 30, "activations": 40}


def test_an_address_is_given_out_again():
    peak = replay(history((1, 10, MODEL), 1, (1, 20, OPTIMIZER), 1, (1, 5, MODEL)), 0)
    assert peak.at_peak_bytes == {"optimizer": 20}


def test_the_innermost_frame_with_a_category_decides():
    step = GradientStep.finish
    assert categorise(frames(measure, step, torch.optim.AdamW.step)) == "gradients"
    assert categorise(frames(MPT.forward, loss._ChunkedCrossEntropy.backward)) == "logits"
    assert categorise(frames(ParallelTrainer._train_microbatches, torch.optim.AdamW.step)) == "rest"


def test_what_fsdp_allocates_is_parameters_gathered_ones_or_gradients():
    assert categorise(frames(FSDPParam._init_sharded_param, FSDPParam.__init__)) == "parameters"
    assert categorise(frames(FSDPParam.reset_sharded_param, torch.nn.Module.to)) == "parameters"
    assert categorise(frames(FSDPParam.init_dtype_attrs, FSDPParamGroup.lazy_init)) == "parameters"
    assert categorise(frames(foreach_all_gather, FSDPParamGroup.unshard, MPT.forward)) == "unsharded"
    assert categorise(frames(foreach_reduce, FSDPParamGroup.post_backward)) == "gradients"


def test_a_history_without_activations_is_an_error():
    with pytest.raises(RuntimeError, match=r"no allocation came from .*llmfoundry_lite/models"):
        replay(history((1, 100, OPTIMIZER)), 0)
