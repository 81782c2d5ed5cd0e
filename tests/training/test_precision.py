"""fp32 is fp32: TF32 is used only where `precision: tf32` asks for it, and then it is printed."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from composer.devices import DeviceCPU

from llmfoundry_lite import devices
from llmfoundry_lite.config.batch_schedule import PerBatch
from llmfoundry_lite.config.eval_schema import EvalConfig
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.evaluation import suite
from llmfoundry_lite.hardware import ACCELERATORS
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.precision import PRECISIONS
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.monitor import RunMonitor
from llmfoundry_lite.training.run_state import build_segment
from llmfoundry_lite.training.trainer import ParallelTrainer
from tests.helpers.tiny import tiny_config, write_config

SMALL = ModelConfig(d_model=8, n_heads=2, n_layers=1, max_seq_len=8, vocab_size=16)
ONE = PerBatch.build(1, None)


@pytest.fixture
def flags():
    """Restore torch's switches after the test."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield lambda: {torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32}
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("NODE_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class AllowingDevice(DeviceCPU):
    """Does to torch's switches what Composer's GPU device does when it is made."""

    def __init__(self):
        super().__init__()
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True), ("amp_bf16", False)])
def test_training_computes_in_tf32_only_when_told(one_rank, flags, precision, allowed):
    devices.set_tf32(False)
    model = LanguageModel(MPT(SMALL), PRECISIONS[precision, "DEFAULT"])
    ParallelTrainer(
        ranks=Layout().data_ranks(0),
        agreement=None,
        gradient_step=None,
        role=LaunchRole(),
        batch_sizes=ONE,
        seq_lens=ONE,
        model=model,
        device=AllowingDevice(),
        progress_bar=False,
    )
    assert flags() == {allowed}


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_evaluation_computes_in_tf32_only_when_told(monkeypatch, flags, precision, allowed):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    devices.set_tf32(not allowed)
    suite.start_device(EvalConfig(models={}, icl_tasks=[], suite="s", precision=precision))
    assert flags() == {allowed}


def test_a_device_without_tf32_says_fp32(monkeypatch):
    assert devices.computed_precision("tf32") == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, computed in (((7, 0), "fp32"), ((8, 0), "tf32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda answer=capability: answer)
        assert devices.computed_precision("tf32") == computed
        assert devices.computed_precision("fp32") == "fp32"
        assert devices.computed_precision("amp_bf16") == "amp_bf16"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.delenv("HIPBLASLT_ALLOW_TF32", raising=False)
    assert devices.computed_precision("tf32") == "fp32"
    monkeypatch.setenv("HIPBLASLT_ALLOW_TF32", "1")
    assert devices.computed_precision("tf32") == "tf32"


def test_mfu_is_a_share_of_the_peak_of_what_is_computed(monkeypatch):
    monkeypatch.setattr(devices, "accelerator", lambda: ACCELERATORS["A100-80GB"])
    peaks = [
        RunMonitor(1, ONE, Duration.parse("1ba"), dtype, LaunchRole(), ONE).peak_flops for dtype in ("fp32", "tf32")
    ]
    assert peaks == [19.5e12, 156e12]


def test_a_segment_records_what_was_computed(tmp_path, one_rank, monkeypatch):
    path = write_config(tmp_path / "tiny.yaml", tiny_config(tmp_path, precision="tf32"))
    config, model = load_train_config([path]).config, LanguageModel(MPT(SMALL), PRECISIONS["tf32", "DEFAULT"])
    for has_tf32, precision in ((True, "tf32 DEFAULT"), (False, "fp32 DEFAULT")):
        monkeypatch.setattr(devices, "has_tf32", lambda answer=has_tf32: answer)
        segment = build_segment(config, model, first_batch=1, last_batch=2)
        assert segment.precision == precision
