"""Compare our model with LLM Foundry's, option by option, from the same weights and tokens.

uv venv --python 3.11 ~/foundry
VIRTUAL_ENV=~/foundry uv pip install llm-foundry==0.22.0 "setuptools<81"
python scripts/parity_llm_foundry.py --peer-python ~/foundry/bin/python

LLM Foundry lives in an environment of its own, because its pins are not ours. This process writes configurations,
weights and tokens to a temporary folder; the same file, run there with --peer, builds MPTForCausalLM (attn_impl torch)
from the same words and writes back logits and gradients, and the folder its save_pretrained makes, which is then read
here. Exit code 1 if anything differs by more than TOLERANCE in fp32, if ours in bf16 is further from the fp32 result
than FURTHEST times theirs, or if a folder read here is not the same model, to the bit.

What LLM Foundry cannot do on a CPU, or without flash-attn, is not here: rope_impl dail, attn_impl flash.
"""

import argparse
import copy
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

Tensors = dict[str, torch.Tensor]

TOLERANCE = 1e-5
"""Largest difference, relative to the largest entry of the logits or of a gradient."""
FURTHEST = 1.5
VANISHING = 1e-6
"""Gradients this small, relative to the largest, are rounding around zero, such as those of keys' biases."""

BASE = {
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 64,
    "vocab_size": 130,
    "no_bias": False,
    "attn_config": {"attn_impl": "torch"},
}
GROUPED = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
ROPE = {"rope": True, "rope_impl": "hf", "rope_theta": 500}
RMS = {"norm_type": "rmsnorm", "norm_eps": 1e-2}


def attention(**options: Any) -> dict[str, Any]:
    return {"attn_config": options}


def ffn(**options: Any) -> dict[str, Any]:
    return {"ffn_config": options}


OPTIONS: dict[str, dict[str, Any]] = {
    "learned positions": {},
    "no positions": {"learned_pos_emb": False},
    "alibi": attention(alibi=True),
    "alibi, 6 heads, bias_max 4": {"d_model": 96, "n_heads": 6, **attention(alibi=True, alibi_bias_max=4)},
    "rope": attention(**ROPE),
    "rope, linear scaling": attention(**ROPE, rope_hf_config={"type": "linear", "factor": 2.0}),
    "rope, dynamic scaling": attention(**ROPE, rope_hf_config={"type": "dynamic", "factor": 2.0}),
    "grouped-query": attention(**GROUPED),
    "multi-query": attention(attn_type="multiquery_attention"),
    "grouped-query, rope": attention(**GROUPED, **ROPE),
    "sliding window": attention(sliding_window_size=7),
    "sliding window, alibi": attention(sliding_window_size=7, alibi=True),
    "attn_uses_sequence_id": attention(attn_uses_sequence_id=True),
    "attn_uses_sequence_id, alibi": attention(attn_uses_sequence_id=True, alibi=True),
    "clip_qkv": attention(clip_qkv=0.5),
    "qk_ln": attention(qk_ln=True),
    "qk_ln, grouped-query": attention(qk_ln=True, **GROUPED),
    "qk_gn": attention(qk_gn=True),
    "qk_gn, grouped-query, rope": attention(qk_gn=True, **GROUPED, **ROPE),
    "softmax_scale": attention(softmax_scale=0.1),
    "fused_qkv: false": attention(fused_qkv=False),
    "fused_qkv: false, grouped-query, clip": attention(fused_qkv=False, clip_qkv=0.5, **GROUPED),
    "mptglu": ffn(ffn_type="mptglu"),
    "mptglu, silu, ffn_hidden_size": ffn(ffn_type="mptglu", ffn_act_fn={"name": "silu"}, ffn_hidden_size=88),
    "gelu by tanh": ffn(ffn_act_fn={"name": "gelu", "approximate": "tanh"}),
    "quick_gelu": ffn(ffn_act_fn={"name": "quick_gelu"}),
    "relu": ffn(ffn_act_fn={"name": "relu"}),
    "silu": ffn(ffn_act_fn={"name": "silu"}),
    "expansion_ratio": {"expansion_ratio": 2.5},
    "layernorm": {"norm_type": "layernorm", "norm_eps": 1e-3},
    "rmsnorm": {"norm_type": "rmsnorm"},
    "low_precision_rmsnorm": {"norm_type": "low_precision_rmsnorm", "norm_eps": 1e-3},
    "no_bias": {"no_bias": True},
    "no_bias, qk_ln": {"no_bias": True, **attention(qk_ln=True)},
    "qk_ln, norm_eps": {"norm_eps": 1e-2, **attention(qk_ln=True)},
    "qk_ln, layernorm": {"norm_type": "layernorm", "norm_eps": 1e-2, **attention(qk_ln=True)},
    "qk_ln, rmsnorm": {"norm_type": "rmsnorm", **attention(qk_ln=True)},
    "qk_ln, rmsnorm, no_bias": {"norm_type": "rmsnorm", "no_bias": True, **attention(qk_ln=True)},
    "qk_gn, low_precision_rmsnorm": {"norm_type": "low_precision_rmsnorm", "norm_eps": 1e-2, **attention(qk_gn=True)},
    "qk_ln of another norm than the model's": attention(qk_ln=True, norm_type="rmsnorm", norm_eps=1e-2),
    "qk_gn of the model's norm": {"norm_type": "rmsnorm", "norm_eps": 1e-2, **attention(qk_gn=True, **RMS)},
    "embedding_fraction": {"embedding_fraction": 0.25},
    "logit_scale": {"logit_scale": 0.3},
    "logit_scale: inv_sqrt_d_model": {"logit_scale": "inv_sqrt_d_model"},
    "untied": {"tie_word_embeddings": False},
    "untied, embedding_fraction": {"tie_word_embeddings": False, "embedding_fraction": 0.25},
    "Llama's": {
        "norm_type": "rmsnorm",
        "no_bias": True,
        "tie_word_embeddings": False,
        **attention(**GROUPED, **ROPE),
        **ffn(ffn_type="mptglu", ffn_act_fn={"name": "silu"}),
    },
}
"""Option -> part of a model block, in keys that both read."""

INIT_BASE = {
    "d_model": 256,
    "n_heads": 4,
    "n_layers": 4,
    "max_seq_len": 256,
    "vocab_size": 512,
    "expansion_ratio": 3,
    "attn_config": {"attn_impl": "torch"},
    "tie_word_embeddings": False,
}
INITS: dict[str, dict[str, Any]] = {
    "kaiming_normal_": {},
    "kaiming_normal_, fan_out": {"fan_mode": "fan_out"},
    "kaiming_uniform_": {"name": "kaiming_uniform_"},
    "kaiming_uniform_, leaky_relu 0.5": {
        "name": "kaiming_uniform_",
        "init_nonlinearity": "leaky_relu",
        "init_gain": 0.5,
    },
    "xavier_normal_": {"name": "xavier_normal_", "init_gain": 1.0},
    "xavier_uniform_, gain 2": {"name": "xavier_uniform_", "init_gain": 2.0},
    "small_init_": {"name": "small_init_"},
    "neox_init_": {"name": "neox_init_"},
    "baseline_": {"name": "baseline_", "init_std": 0.02},
    "default_": {"name": "default_"},
    "init_div_is_residual: false": {"init_div_is_residual": False},
    "init_div_is_residual: 3": {"init_div_is_residual": 3},
    "emb_init_std": {"emb_init_std": 0.01},
    "emb_init_uniform_lim": {"emb_init_uniform_lim": [-0.05, 0.05]},
}
COLUMNS = (
    *("logits, fp32", "gradients, fp32", "logits, bf16: ours, theirs", "gradients, bf16: ours, theirs"),
    "their folder read here",
)
SHOWN = ("wte", "wpe", "Wqkv", "out_proj", "up_proj", "down_proj")


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--peer-python", help="python of an environment with llm-foundry")
    arguments.add_argument("--peer", metavar="FOLDER", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.peer:
        run_peer(Path(given.peer))
    elif given.peer_python:
        python = shutil.which(given.peer_python)
        if python is None:
            arguments.error(f"--peer-python: {given.peer_python} cannot be run; expected the python of an environment")
        sys.exit(0 if run(os.path.abspath(python)) else 1)
    else:
        arguments.error("--peer-python: missing; expected the python of an environment with llm-foundry")


def run(peer_python: str) -> bool:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact, low = {}, {}
        for option in OPTIONS:
            model, inputs = build_ours(option)
            place = folder / file_name(option)
            place.mkdir()
            save_file({k: v.contiguous() for k, v in model.state_dict().items()}, place / "weights.safetensors")
            save_file(inputs, place / "inputs.safetensors")
            exact[option], low[option] = compute_twice(model, inputs, call_ours)
        versions = start_peer(peer_python, folder)
        print(f"LLM Foundry {versions['llmfoundry']} (torch {versions['torch']}), ours (torch {torch.__version__})\n")
        print(f"| option | {' | '.join(COLUMNS)} |")
        print(f"|---|{'---|' * len(COLUMNS)}")
        are_equal = [compare(option, exact[option], low[option], folder) for option in OPTIONS]
        print(f"\n| standard deviations, ours and theirs | {' | '.join(SHOWN)} |")
        print(f"|---|{'---|' * len(SHOWN)}")
        are_equal += [compare_init(scheme, folder) for scheme in INITS]
    print(f"\n{sum(are_equal)} of {len(are_equal)} agree")
    return all(are_equal)


def start_peer(python: str, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(Path(__file__).resolve()), "--peer", str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python}: the peer ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads((folder / "versions.json").read_text())


# ------------------------------------------------------------------------------------------------- both processes


Call = Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]


def file_name(option: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in option)


def model_block(part: Mapping[str, Any], base: Mapping[str, Any] = BASE) -> dict[str, Any]:
    block = copy.deepcopy({**base, **part})
    block["attn_config"] = {**base["attn_config"], **block["attn_config"]}
    return block


def compute_twice(model: nn.Module, inputs: Mapping[str, torch.Tensor], call: Call) -> tuple[Tensors, Tensors]:
    """Return logits and gradients in fp32, and in bf16 as with FSDP's PURE: parameters and everything else in bf16."""
    exact = compute(model, inputs, call)
    for parameter in model.parameters():
        parameter.grad, parameter.data = None, parameter.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        return exact, compute(model, inputs, call)


def compute(model: nn.Module, inputs: Mapping[str, torch.Tensor], call: Call) -> Tensors:
    logits_btv = call(model.eval(), inputs)
    with torch.autocast("cpu", enabled=False):
        F.cross_entropy(logits_btv[:, :-1].float().flatten(0, 1), inputs["tokens"][:, 1:].flatten()).backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits_btv.detach().float().clone()} | gradients


def spread(named_tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return kind of tensor (its name without the block's number) -> count, mean, standard deviation, kurtosis."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named_tensors.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        kinds.setdefault(kind, []).append(tensor.detach().double().flatten())
    found = {}
    for kind, tensors in kinds.items():
        numbers = torch.cat(tensors)
        std = float(numbers.std())
        kurtosis = float((numbers - numbers.mean()).pow(4).mean()) / std**4 if std else 0.0
        found[kind] = [len(numbers), float(numbers.mean()), std, kurtosis]
    return found


# ------------------------------------------------------------------------------------------------------- our half


def build_ours(option: str) -> tuple[nn.Module, Tensors]:
    """Return our model, with weights that avoid special values: norms and biases are off one and zero."""
    from llmfoundry_lite.config.build import build_block
    from llmfoundry_lite.config.model_schema import ModelConfig
    from llmfoundry_lite.models.mpt import MPT

    torch.manual_seed(0)
    config = build_block(ModelConfig, model_block(OPTIONS[option]), "model")
    model = MPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or "_ln" in name
            parameter.normal_(1.0 if is_norm and name.endswith("weight") else 0.0, 0.15)
    inputs = {"tokens": torch.randint(config.vocab_size, (3, 50))}
    if config.attn_config.attn_uses_sequence_id:
        inputs["documents"] = (torch.rand(3, 50) < 0.1).long().cumsum(dim=1)
    return model, inputs


def call_ours(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return model(inputs["tokens"], documents_bt=inputs.get("documents"))


def init_ours(scheme: str) -> dict[str, list[float]]:
    from llmfoundry_lite.config.build import build_block
    from llmfoundry_lite.config.model_schema import ModelConfig
    from llmfoundry_lite.models.initialise import initialise_weights
    from llmfoundry_lite.models.mpt import MPT

    block = model_block({"init_config": INITS[scheme]}, INIT_BASE)
    model = MPT(build_block(ModelConfig, block, "model"))
    initialise_weights(model, 17)
    return spread(dict(model.named_parameters()))


def compare(option: str, exact: Tensors, low: Tensors, folder: Path) -> bool:
    """Print the option's row. In bf16 both are compared with LLM Foundry's fp32 result."""
    place = folder / file_name(option)
    their_exact, their_low = (load_file(place / f"{name}.safetensors") for name in ("exact", "low"))
    assert exact.keys() == their_exact.keys()
    logits, *gradients = difference(exact, their_exact)
    ours, theirs = (
        [distance(found, their_exact, names) for names in (["logits"], [name for name in exact if name != "logits"])]
        for found in (low, their_low)
    )
    is_readable = torch.equal(read_folder(place), exact["logits"])
    is_equal = (
        is_readable
        and max(logits, *gradients) < TOLERANCE
        and all(a <= FURTHEST * b for a, b in zip(ours, theirs, strict=True))
    )
    print(
        f"| {option} | {logits:.0e} | {max(gradients):.0e} | {ours[0]:.2%}, {theirs[0]:.2%} | "
        f"{ours[1]:.2%}, {theirs[1]:.2%} | {'same' if is_readable else 'another'} |{'' if is_equal else ' **differs**'}"
    )
    return is_equal


def read_folder(place: Path) -> torch.Tensor:
    """Return the logits of the folder that LLM Foundry's model was saved to."""
    from llmfoundry_lite.convert.huggingface import import_model
    from llmfoundry_lite.models.mpt import MPT

    config, weights = import_model(place / "folder")
    model = MPT(config).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return call_ours(model, load_file(place / "inputs.safetensors"))


def difference(ours: Tensors, theirs: Tensors) -> list[float]:
    """Return a number for each tensor, logits first: largest difference over largest entry; infinite for NaN."""
    largest_gradient = max(float(theirs[name].abs().max()) for name in theirs if name != "logits")
    found = []
    for name, tensor in sorted(theirs.items(), key=lambda item: item[0] != "logits"):
        floor = 0.0 if name == "logits" else VANISHING * largest_gradient
        scale = float(tensor.abs().max())
        error = float((ours[name] - tensor).abs().max()) / (scale if scale > floor else largest_gradient)
        found.append(error if math.isfinite(error) else math.inf)
    return found


def distance(found: Tensors, exact: Tensors, names: list[str]) -> float:
    """Return |found - exact| / |exact|, Euclidean, over all these tensors together."""
    squares = [((found[name] - exact[name]).square().sum(), exact[name].square().sum()) for name in names]
    return float(sum(error for error, _ in squares) / sum(size for _, size in squares)) ** 0.5


def compare_init(scheme: str, folder: Path) -> bool:
    """Print the scheme's row. Standard deviations of n numbers scatter by 1/sqrt(2n), normal, or less, uniform."""
    ours = init_ours(scheme)
    theirs = json.loads((folder / f"init-{file_name(scheme)}.json").read_text())
    assert ours.keys() == theirs.keys()
    differing = []
    for kind, (count, mean, std, kurtosis) in ours.items():
        _, their_mean, their_std, their_kurtosis = theirs[kind]
        # Five times what two samples differ by; a kurtosis (3 or 1.8) scatters by sqrt(24/n).
        same_std = abs(std - their_std) <= 5 * their_std / math.sqrt(count)
        same_mean = abs(mean - their_mean) <= 5 * their_std * math.sqrt(2 / count)
        same_shape = abs(kurtosis - their_kurtosis) <= 5 * math.sqrt(48 / count)
        if not (same_std and same_mean and same_shape):
            differing.append(f"{kind} {std:.4f}, {their_std:.4f}")
    cells = []
    for part in SHOWN:
        kind = next(kind for kind in ours if kind.endswith(f"{part}.weight"))
        cells.append(f"{ours[kind][2]:.4f}, {theirs[kind][2]:.4f}")
    print(f"| {scheme} | {' | '.join(cells)} |{' **differs** ' + '; '.join(differing) if differing else ''}")
    return not differing


# ----------------------------------------------------------------------------------------------------- their half


def run_peer(folder: Path) -> None:
    import llmfoundry  # type: ignore[import-not-found]
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM  # type: ignore[import-not-found]

    def call(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=inputs["tokens"], sequence_id=inputs.get("documents")).logits

    for option, part in OPTIONS.items():
        place = folder / file_name(option)
        model = MPTForCausalLM(MPTConfig(**model_block(part)))
        model.load_state_dict(load_file(place / "weights.safetensors"))
        model.save_pretrained(place / "folder")
        exact, low = compute_twice(model, load_file(place / "inputs.safetensors"), call)
        save_file(exact, place / "exact.safetensors")
        save_file(low, place / "low.safetensors")
    for scheme, init in INITS.items():
        torch.manual_seed(3)
        model = MPTForCausalLM(MPTConfig(**model_block({"init_config": init}, INIT_BASE)))
        # As for a model on the meta device, which is how LLM Foundry trains.
        model.apply(model.param_init_fn)
        (folder / f"init-{file_name(scheme)}.json").write_text(json.dumps(spread(dict(model.named_parameters()))))
    versions = {"llmfoundry": llmfoundry.__version__, "torch": torch.__version__}
    (folder / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main()
