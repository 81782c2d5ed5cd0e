"""Runs with muP: learning rates of each kind, on other ranks, resumed, in stages and with divided layers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import llmfoundry_lite as lf
from llmfoundry_lite.checkpoint.full_tensors import load_full_tensors, open_checkpoint
from llmfoundry_lite.cli.main import run as run_command
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.mup import MupConfig
from llmfoundry_lite.config.optimizer_schema import OptimizerConfig
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.training.builders import build_optimizer_of
from llmfoundry_lite.training.memory import _state_bytes
from llmfoundry_lite.training.optimizers import OptimizerContext
from tests.helpers.present import needs
from tests.helpers.runs import attempt, losses, run, saves
from tests.helpers.tiny import reading_texts, tiny_config, write_data, write_texts

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MUP = {"base_width": 16, "base_head_dim": 4, "embedding_mult": 2.0}
"""The tiny model's width is 32, and its heads have 8 dimensions."""
SHARDED = {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
LAYOUTS = {
    "sharded": (2, SHARDED),
    "ZeRO-1": (3, {"fsdp_config": {"sharding_strategy": "ZERO_1"}}),
    "stages": (2, {"pp_config": {"pipeline_parallel_degree": 2}}),
}
DIVIDED = {
    "tensor": (2, {"tp_config": {"tensor_parallel_degree": 2}}),
    "context": (2, {"cp_config": {"context_parallel_degree": 2}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with `whole`, a run of 6 batches on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder / "data")
    run(folder, config(folder), "whole")
    return folder


def config(folder, **changes):
    options = {"global_train_batch_size": 12, "device_train_microbatch_size": 1, "max_duration": "6ba"}
    options |= {"save_interval": "2ba", "autoresume": True, "exact_sums": True, "model__mup": MUP}
    optimizer = {"name": "decoupled_adamw", "lr": 1e-2, "weight_decay": 1e-3, "eps": 1e-6}
    return tiny_config(folder / "data", **{**options, "optimizer": optimizer, **changes})


def weights(folder, name):
    return load_full_tensors(str(saves(folder, name) / "ba6"))


def assert_bit_equal(folder, name, expected="whole"):
    assert losses(folder, name) == losses(folder, expected) and len(losses(folder, name)) == 6
    there, here = weights(folder, expected), weights(folder, name)
    assert [key for key in there if not torch.equal(there[key], here[key])] == []


@pytest.mark.parametrize("layout", [*LAYOUTS])
@needs("llmfoundry_layouts")
def test_it_carries_on_on_other_ranks_bit_equal(folder, layout):
    num_ranks, options = LAYOUTS[layout]
    run(folder, config(folder), f"to-{layout}", stop_at="4ba")
    run(folder, config(folder), f"to-{layout}", num_ranks, **options)
    assert_bit_equal(folder, f"to-{layout}")
    run(folder, config(folder), f"from-{layout}", num_ranks, stop_at="4ba", **options)
    run(folder, config(folder), f"from-{layout}")
    assert_bit_equal(folder, f"from-{layout}")


@pytest.mark.parametrize("layout", [*DIVIDED])
@needs("llmfoundry_layouts")
def test_divided_layers_and_samples_train_the_same(folder, layout):
    num_ranks, options = DIVIDED[layout]
    run(folder, config(folder, exact_sums=False), layout, num_ranks, **options)
    assert losses(folder, layout) == pytest.approx(losses(folder, "whole"), rel=1e-4)


def test_a_checkpoint_has_the_rates_of_both_groups(folder):
    groups = open_checkpoint(saves(folder, "whole") / "ba6").manifest.optimizer["groups"]
    base, hidden = (group["options"] for group in groups)
    assert base["initial_lr"] == 1e-2 and hidden["initial_lr"] == 5e-3
    # A step shrinks all weights by weight_decay * lr / initial lr.
    assert base["weight_decay"] * 1e-2 == pytest.approx(hidden["weight_decay"] * 5e-3) == pytest.approx(1e-3)
    assert base["eps"] == hidden["eps"] == 5e-7
    assert all("blocks" in name and name.endswith("weight") for name in groups[1]["params"])
    assert len(groups[1]["params"]) == 8


@pytest.mark.parametrize(("adjust_lr_fn", "factor"), [("match_rms_adamw", 0.5**0.5), ("original", 1.0)])
def test_muon_has_a_rate_of_its_own_for_matrices(folder, adjust_lr_fn, factor):
    name = f"muon-{adjust_lr_fn}"
    muon = {"name": "muon", "lr": 2e-2, "adamw_lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": adjust_lr_fn}
    run(folder, config(folder, optimizer=muon), f"{name}-whole")
    run(folder, config(folder, optimizer=muon), name, stop_at="2ba")
    run(folder, config(folder, optimizer=muon), name, 2, **SHARDED)
    assert_bit_equal(folder, name, f"{name}-whole")
    groups = open_checkpoint(saves(folder, name) / "ba6").manifest.optimizer["groups"]
    matrices, others = (group for group in groups if group["params"])
    assert matrices["options"]["initial_lr"] == pytest.approx(2e-2 * factor)
    assert matrices["options"]["weight_decay"] == pytest.approx(0.1 / factor)
    assert others["options"]["initial_lr"] == 1e-2 and others["options"]["weight_decay"] == 0.1


@pytest.mark.parametrize("optimizer", ["decoupled_adamw", "muon"])
def test_at_the_base_width_nothing_changes(folder, optimizer):
    options = {"optimizer": {"name": optimizer, "lr": 1e-2, "weight_decay": 0.01}}
    plain = config(folder, **options)
    del plain["model"]["mup"]
    run(folder, plain, f"plain-{optimizer}", 2)
    run(folder, config(folder, model__mup={"base_width": 32}, **options), f"base-{optimizer}", 2)
    assert_bit_equal(folder, f"base-{optimizer}", f"plain-{optimizer}")


def test_another_base_in_mid_run_is_refused(folder):
    name = "changed"
    run(folder, config(folder), name, stop_at="2ba")
    refused = attempt(folder, config(folder, model__mup={**MUP, "base_width": 8}), name)
    assert refused.exit_codes == [2]
    assert "model.mup.base_width is 8 here and 16 in the checkpoint" in refused.output
    plain = config(folder)
    del plain["model"]["mup"]
    assert "model.mup is null here and" in attempt(folder, plain, name).output


def test_another_learning_rate_in_mid_run_scales_both_groups(folder):
    name = "another-rate"
    run(folder, config(folder), name, stop_at="2ba")
    optimizer = {**config(folder)["optimizer"], "lr": 2e-2}
    run(folder, config(folder, optimizer=optimizer), name)
    groups = open_checkpoint(saves(folder, name) / "ba6").manifest.optimizer["groups"]
    assert [group["options"]["initial_lr"] for group in groups] == [2e-2, 1e-2]


# ------------------------------------------------------------------------------------ with optimizer.param_groups

GROUPS = [
    {"param_str_match": "norm|bias", "weight_decay": 0.0},
    {"param_str_match": r"blocks\.1\.ffn|wpe", "lr": 4e-3, "weight_decay": 0.2},
]


@pytest.mark.parametrize("name", ["decoupled_adamw", "adamw", "muon"])
@needs("llmfoundry_layouts")
def test_groups_have_factors_on_top_and_move_between_layouts_bit_equal(folder, name):
    optimizer = {"name": name, "lr": 1e-2, "weight_decay": 0.1, "param_groups": GROUPS}
    run(folder, config(folder, optimizer=optimizer), f"groups-{name}-whole")
    moves = [(1, {}), LAYOUTS["sharded"], LAYOUTS["ZeRO-1"], LAYOUTS["stages"]]
    for stop, (num_ranks, layout) in zip(("1ba", "2ba", "4ba", "6ba"), moves, strict=True):
        run(folder, config(folder, optimizer=optimizer), f"groups-{name}", num_ranks, stop_at=stop, **layout)
    assert_bit_equal(folder, f"groups-{name}", f"groups-{name}-whole")

    settings = {}
    for group in open_checkpoint(saves(folder, f"groups-{name}") / "ba6").manifest.optimizer["groups"]:
        options = group["options"]
        # The share of a weight that a step at the full rate takes away.
        decay = options["weight_decay"] * options["initial_lr"]
        for parameter in group["params"]:
            settings[parameter.partition("transformer.")[2]] = pytest.approx((options["initial_lr"], decay))
    factor = 0.5**0.5 if name == "muon" else 0.5
    by_rate = {"decoupled_adamw": 1}  # weight decay is a share already; the others multiply it by the rate
    assert settings["wte.weight"] == (1e-2, 0.1 * by_rate.get(name, 1e-2))
    assert settings["blocks.0.ffn.up_proj.weight"] == (1e-2 * factor, 0.1 * by_rate.get(name, 1e-2))
    assert settings["wpe.weight"] == (4e-3, 0.2 * by_rate.get(name, 4e-3))
    assert settings["blocks.1.ffn.up_proj.weight"] == (4e-3 * factor, 0.2 * by_rate.get(name, 4e-3))
    assert settings["blocks.1.ffn.up_proj.bias"] == (1e-2, 0.0)


def test_muons_state_is_counted_by_what_each_group_keeps():
    """The search for a microbatch reserves memory for it before the first step."""
    model_config = ModelConfig(
        d_model=32, n_heads=4, n_layers=2, max_seq_len=32, vocab_size=95, mup=MupConfig(base_width=16)
    )
    model = MPT(model_config)
    context = OptimizerContext(model=model, model_config=model_config, layout=Layout())
    optimizer = build_optimizer_of(OptimizerConfig(name="muon", lr=0.1), dict(model.named_parameters()), context)
    parameters = dict(model.named_parameters())
    num_elements = sum(parameter.numel() for parameter in parameters.values())
    num_in_matrices = sum(
        parameter.numel() for name, parameter in parameters.items() if "blocks" in name and parameter.ndim == 2
    )
    assert _state_bytes(optimizer, (1, 2)) == 4 * (num_in_matrices + 2 * (num_elements - num_in_matrices))


# ------------------------------------------------------------------------------------------------------ by commands

LLAMA = {
    "model__no_bias": True,
    "model__norm_type": "rmsnorm",
    "model__tie_word_embeddings": False,
    "model__attn_config": {"rope": True},
    "model__ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 48, "ffn_act_fn": {"name": "silu"}},
}


def test_a_model_keeps_its_answers_from_the_first_launch_to_the_export(folder, tmp_path, capsys):
    """The multipliers are no powers of 2. Trained on two ranks, resumed on one, evaluated, continued and exported."""
    texts = write_texts(tmp_path / "texts")
    mup = {"base_width": 16, "base_head_dim": 4, "embedding_mult": 3.0}
    yaml = config(folder, **{**LLAMA, **reading_texts(texts), "model__mup": mup})
    yaml["train_loader"]["dataset"]["local"] = yaml["eval_loader"]["dataset"]["local"] = str(texts)
    run(tmp_path, yaml, "whole")
    run(tmp_path, yaml, "moved", 2, stop_at="4ba", **SHARDED)
    run(tmp_path, yaml, "moved")
    assert_bit_equal(tmp_path, "moved")

    saved, exported, imported = saves(tmp_path, "moved") / "ba6", tmp_path / "exported", tmp_path / "imported"
    assert run_command(["checkpoint", "export", str(saved), str(exported)]) == 0
    assert run_command(["checkpoint", "import", str(exported), str(imported)]) == 0
    loaded = [lf.load(str(source)) for source in (saved, exported, imported)]
    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    tokens_bt = torch.randint(320, (3, 29), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits_btv = theirs(tokens_bt).logits
        for ours in loaded:
            assert (ours.model(tokens_bt) - logits_btv).abs().max() < 1e-5

    (tmp_path / "task.jsonl").write_text('{"context": "abc", "continuation": "def"}\n' * 2)
    task = {"label": "t", "dataset_uri": str(tmp_path / "task.jsonl"), "num_fewshot": [0]}
    task["icl_task_type"] = "language_modeling"
    models = {"ours": str(saved), "exported": str(exported), "imported": str(imported)}
    results = lf.evaluate({"icl_tasks": [task]}, models=models, results_folder=str(tmp_path / "results"))
    answers = [[item["log_probability"][0] for item in results[name].items["t/0-shot"]] for name in models]
    assert len(answers[0]) == 2
    assert answers[1] == pytest.approx(answers[0], abs=1e-5)
    assert answers[2] == pytest.approx(answers[0], abs=1e-5)

    capsys.readouterr()
    written: list[str] = []
    for source in models.values():
        assert run_command(["generate", source, "--prompt", "abc", "--max-new-tokens", "8"]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] == written[2] != ""
