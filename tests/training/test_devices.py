"""Where tensors lie in training on GPUs, seen without one."""

from types import SimpleNamespace
from typing import Any

import torch

from llmfoundry_lite import devices
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.evaluation.results import Results
from llmfoundry_lite.training import in_context, run_handle


def test_tasks_go_to_the_device_though_parameters_are_offloaded(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(
        in_context, "evaluate", lambda model, *_, **__: asked.append(model) or Results(model="", suite="", source="")
    )
    linear: Any = torch.nn.Linear(2, 2)
    linear.model = SimpleNamespace(
        config=SimpleNamespace(max_seq_len=8, vocab_size=8, attn_config=SimpleNamespace(attn_uses_sequence_id=False))
    )
    linear.precision, linear.separator = SimpleNamespace(autocast=None), None
    callback: Any = object.__new__(in_context.InContext)
    callback.__dict__.update(
        model=linear, tokenizer=None, tasks=[], max_batch_tokens=8, limit=None, ranks=SimpleNamespace(rank=0, size=1)
    )
    device = torch.device("meta")
    state, logger = SimpleNamespace(device=SimpleNamespace(_device=device)), SimpleNamespace(log_metrics=lambda _: None)
    callback.evaluate(state, logger, lambda *_: None)
    assert asked[0].device == device


def test_batches_of_one_launch_among_several_are_pinned_like_any_run_s(monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(devices, "device_type", lambda: "cuda")
    monkeypatch.setattr(run_handle, "build_text_loader", lambda dataset, **options: given.update(options) or [])
    run: Any = object.__new__(run_handle.RunHandle)
    run._state = SimpleNamespace(timestamp=SimpleNamespace(epoch=0, batch_in_epoch=0))
    run._agreement = SimpleNamespace(ranks=DataRanks(rank=0, size=1, is_counted=True))
    run._dataset = SimpleNamespace(global_batch_size=4, resume_with_rows=lambda *_: None)
    for loader in (LoaderConfig(num_workers=2, timeout=30.0), LoaderConfig(timeout=30.0, pin_memory=False)):
        run.config = SimpleNamespace(train_loader=loader)
        run.read(range(4))
        assert given["pin_memory"] == loader.pin_memory and given["timeout"] == 30.0
