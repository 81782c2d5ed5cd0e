"""Compare our model with LLM Foundry's, option by option, from the same weights and tokens.

uv venv --python 3.11 ~/foundry
VIRTUAL_ENV=~/foundry uv pip install llm-foundry==0.22.0 "setuptools<81"
python scripts/parity_llm_foundry.py --peer-python ~/foundry/bin/python

LLM Foundry has its own environment, because it pins other versions than we do. This process (`run`) writes weights and
tokens for each option to a temporary folder. It then runs this file with --peer in that environment (`run_peer`), which
builds MPTForCausalLM (attn_impl torch) from the same configuration, and writes back its logits, its gradients and the
folder that save_pretrained makes. Finally this process compares them. For each scheme of initialisation, both also
compare the distributions of the weights that they draw.

In the temporary folder, each option has a folder with weights.safetensors and inputs.safetensors (ours), and with
exact.safetensors, low.safetensors and folder/ (theirs). *Exact* is fp32 and *low* is bf16.

The exit code is 1 if anything differs by more than TOLERANCE in fp32, if ours in bf16 is further from the fp32 result
than FURTHEST times theirs, or if a folder that LLM Foundry wrote is read here as a model with other logits.

Two options are left out because LLM Foundry cannot run them on a CPU without flash-attn: rope_impl dail and attn_impl
flash. Suffixes of tensors are their dimensions: b samples, t tokens, v entries of the vocabulary.
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
"""`logits`, [b, t, v], and the gradient of each parameter by its name, all in fp32."""

TOLERANCE = 1e-5
"""Largest difference, relative to the largest entry of the logits or of a gradient."""
FURTHEST = 1.5
"""Largest distance of our bf16 result from their fp32 result, as a multiple of their own bf16 result's distance."""
VANISHING = 1e-6
"""Gradients this small, relative to the largest, are only rounding errors, such as those of the biases of keys."""

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
"""Name of an option -> the keys of a model's configuration that differ from BASE. Both packages read them."""

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
"""Headings of the table of options, after the option."""
SHOWN = ("wte", "wpe", "Wqkv", "out_proj", "up_proj", "down_proj")
"""Weights whose standard deviations the table of initialisations shows."""


def main() -> None:
    """Parse the command line, and run one of the two halves. Exits with 1 if the models differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer-python", help="python of an environment with llm-foundry")
    parser.add_argument("--peer", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer:
        run_peer(Path(options.peer))
    elif options.peer_python:
        python = shutil.which(options.peer_python)
        if python is None:
            parser.error(f"--peer-python: {options.peer_python} cannot be run; expected the python of an environment")
        sys.exit(0 if run(os.path.abspath(python)) else 1)
    else:
        parser.error("--peer-python: missing; expected the python of an environment with llm-foundry")


def run(peer_python: str) -> bool:
    """Compare all options and all schemes of initialisation, and print a table of each. Return whether all agree."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact = {}
        low = {}
        for option in OPTIONS:
            model, inputs = build_ours(option)
            option_folder = folder / file_name(option)
            option_folder.mkdir()
            # safetensors refuses tensors that are views of others.
            weights = {parameter_name: tensor.contiguous() for parameter_name, tensor in model.state_dict().items()}
            save_file(weights, option_folder / "weights.safetensors")
            save_file(inputs, option_folder / "inputs.safetensors")
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
    """Run LLM Foundry's half in its environment, and return its versions. Exits if it fails."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(Path(__file__).resolve()), "--peer", str(folder)]
    peer = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if peer.returncode:
        sys.exit(f"{python}: the peer ended with code {peer.returncode}:\n{peer.stderr[-3000:]}")
    return json.loads((folder / "versions.json").read_text())


# ------------------------------------------------------------------------------------------------- both processes


Call = Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]
"""Compute a model's logits [b, t, v] from inputs: `tokens` [b, t] and, for some options, `documents` [b, t]."""


def file_name(option: str) -> str:
    """Return an option or a scheme as the name of a file: characters other than letters and digits become hyphens."""
    return "".join(letter if letter.isalnum() else "-" for letter in option)


def model_block(part: Mapping[str, Any], base: Mapping[str, Any] = BASE) -> dict[str, Any]:
    """Return the `model` block of a configuration: `base` with the keys of `part`. Their `attn_config` is merged."""
    block = copy.deepcopy({**base, **part})
    block["attn_config"] = {**base["attn_config"], **block["attn_config"]}
    return block


def compute_twice(model: nn.Module, inputs: Mapping[str, torch.Tensor], call: Call) -> tuple[Tensors, Tensors]:
    """Return logits and gradients in fp32, and then in bf16. Leaves the model in bf16.

    In bf16 parameters and everything else are bf16, as with FSDP's mixed precision PURE.
    """
    exact = compute(model, inputs, call)
    for parameter in model.parameters():
        parameter.grad = None
        parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        low = compute(model, inputs, call)
    return exact, low


def compute(model: nn.Module, inputs: Mapping[str, torch.Tensor], call: Call) -> Tensors:
    """Compute the logits, and the gradients of the loss, which is always in fp32. Sets the parameters' `grad`."""
    logits_btv = call(model.eval(), inputs)
    with torch.autocast("cpu", enabled=False):
        # Each token but the last predicts the next one.
        predictions_btv = logits_btv[:, :-1].float()
        F.cross_entropy(predictions_btv.flatten(0, 1), inputs["tokens"][:, 1:].flatten()).backward()
    gradients = {
        name: parameter.grad.float() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return {"logits": logits_btv.detach().float().clone()} | gradients


def describe_distributions(named_tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return the count, mean, standard deviation and kurtosis of the weights in each place of a model.

    All blocks count together: `blocks.0.attn.Wqkv.weight` and `blocks.1.attn.Wqkv.weight` are both
    `blocks.attn.Wqkv.weight`. The kurtosis tells a normal distribution (3) from a uniform one (1.8).
    """
    tensors_by_place: dict[str, list[torch.Tensor]] = {}
    for name, tensor in named_tensors.items():
        place = ".".join(part for part in name.split(".") if not part.isdigit())
        tensors_by_place.setdefault(place, []).append(tensor.detach().double().flatten())

    statistics_by_place = {}
    for place, tensors in tensors_by_place.items():
        numbers = torch.cat(tensors)
        mean = numbers.mean()
        std = float(numbers.std())
        # Constants, such as norms' scales, have none.
        kurtosis = float((numbers - mean).pow(4).mean()) / std**4 if std else 0.0
        statistics_by_place[place] = [len(numbers), float(mean), std, kurtosis]
    return statistics_by_place


# ------------------------------------------------------------------------------------------------------- our half


def build_ours(option: str) -> tuple[nn.Module, Tensors]:
    """Return our model with random weights, and random inputs [3, 50] for it.

    Norms and biases have other weights than their usual ones and zeros, so that an error in them shows.
    """
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
        # Each token begins a new document with a probability of 0.1. Documents are counted from 0.
        inputs["documents"] = (torch.rand(3, 50) < 0.1).long().cumsum(dim=1)
    return model, inputs


def call_ours(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute our model's logits, in the dtype of its parameters."""
    with torch.autocast("cpu", enabled=False):
        return model(inputs["tokens"], documents_bt=inputs.get("documents"))


def init_ours(scheme: str) -> dict[str, list[float]]:
    """Initialise our model by one scheme, and return the distributions of its weights."""
    from llmfoundry_lite.config.build import build_block
    from llmfoundry_lite.config.model_schema import ModelConfig
    from llmfoundry_lite.models.initialise import initialise_weights
    from llmfoundry_lite.models.mpt import MPT

    block = model_block({"init_config": INITS[scheme]}, INIT_BASE)
    model = MPT(build_block(ModelConfig, block, "model"))
    initialise_weights(model, 17)
    return describe_distributions(dict(model.named_parameters()))


def compare(option: str, exact: Tensors, low: Tensors, folder: Path) -> bool:
    """Print the row of one option, and return whether the two models agree.

    `exact` and `low` are our results in fp32 and bf16. Theirs are read from the option's folder. In bf16 both results
    are compared with theirs in fp32, since two bf16 results differ by rounding alone.
    """
    option_folder = folder / file_name(option)
    their_exact = load_file(option_folder / "exact.safetensors")
    their_low = load_file(option_folder / "low.safetensors")
    assert exact.keys() == their_exact.keys()

    logits_difference, *gradient_differences = difference(exact, their_exact)
    largest_gradient_difference = max(gradient_differences)
    gradient_names = [name for name in exact if name != "logits"]
    logits_distance = distance(low, their_exact, ["logits"])
    their_logits_distance = distance(their_low, their_exact, ["logits"])
    gradients_distance = distance(low, their_exact, gradient_names)
    their_gradients_distance = distance(their_low, their_exact, gradient_names)
    is_same_folder = torch.equal(read_folder(option_folder), exact["logits"])

    is_equal = (
        is_same_folder
        and max(logits_difference, largest_gradient_difference) < TOLERANCE
        and logits_distance <= FURTHEST * their_logits_distance
        and gradients_distance <= FURTHEST * their_gradients_distance
    )
    cells = [
        option,
        f"{logits_difference:.0e}",
        f"{largest_gradient_difference:.0e}",
        f"{logits_distance:.2%}, {their_logits_distance:.2%}",
        f"{gradients_distance:.2%}, {their_gradients_distance:.2%}",
        "same" if is_same_folder else "another",
    ]
    print(f"| {' | '.join(cells)} |{'' if is_equal else ' **differs**'}")
    return is_equal


def read_folder(option_folder: Path) -> torch.Tensor:
    """Import the folder that LLM Foundry's model was saved to, and return the imported model's logits."""
    from llmfoundry_lite.convert.huggingface import import_model
    from llmfoundry_lite.models.mpt import MPT

    config, weights = import_model(option_folder / "folder")
    model = MPT(config).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return call_ours(model, load_file(option_folder / "inputs.safetensors"))


def difference(ours: Tensors, theirs: Tensors) -> list[float]:
    """Return for each tensor, logits first, the largest difference as a share of the tensor's largest entry.

    Gradients which vanish (VANISHING) are compared with the largest entry of all gradients instead. NaN in either gives
    infinity.
    """
    largest_gradient = max(float(theirs[name].abs().max()) for name in theirs if name != "logits")
    relative_differences = []
    for name, tensor in sorted(theirs.items(), key=lambda item: item[0] != "logits"):
        scale = float(tensor.abs().max())
        smallest_scale = 0.0 if name == "logits" else VANISHING * largest_gradient
        if not scale > smallest_scale:
            scale = largest_gradient
        relative_difference = float((ours[name] - tensor).abs().max()) / scale
        relative_differences.append(relative_difference if math.isfinite(relative_difference) else math.inf)
    return relative_differences


def distance(low: Tensors, exact: Tensors, names: list[str]) -> float:
    """Return |low - exact| / |exact|, the Euclidean norms over all tensors of these names together."""
    squared_error = sum((low[name] - exact[name]).square().sum() for name in names)
    squared_size = sum(exact[name].square().sum() for name in names)
    return float(squared_error / squared_size) ** 0.5


def compare_init(scheme: str, folder: Path) -> bool:
    """Print the row of one scheme of initialisation, and return whether both draw weights of the same distributions.

    The two packages draw other random numbers, so only mean, standard deviation and kurtosis can agree. They may differ
    by five times what two samples of n numbers differ by. A standard deviation scatters by its 1/sqrt(2n) if the
    numbers are normal, and by less if they are uniform. A mean scatters by std/sqrt(n), a kurtosis by sqrt(24/n).
    """
    ours = init_ours(scheme)
    theirs = json.loads((folder / f"init-{file_name(scheme)}.json").read_text())
    assert ours.keys() == theirs.keys()
    differing = []
    for place, (count, mean, std, kurtosis) in ours.items():
        _, their_mean, their_std, their_kurtosis = theirs[place]
        # The difference of two samples scatters by sqrt(2) times as much as each.
        has_same_std = abs(std - their_std) <= 5 * their_std / math.sqrt(count)
        has_same_mean = abs(mean - their_mean) <= 5 * their_std * math.sqrt(2 / count)
        has_same_kurtosis = abs(kurtosis - their_kurtosis) <= 5 * math.sqrt(48 / count)
        if not (has_same_std and has_same_mean and has_same_kurtosis):
            differing.append(f"{place} {std:.4f}, {their_std:.4f}")

    cells = []
    for weight in SHOWN:
        place = next(place for place in ours if place.endswith(f"{weight}.weight"))
        cells.append(f"{ours[place][2]:.4f}, {theirs[place][2]:.4f}")
    print(f"| {scheme} | {' | '.join(cells)} |{' **differs** ' + '; '.join(differing) if differing else ''}")
    return not differing


# ----------------------------------------------------------------------------------------------------- their half


def run_peer(folder: Path) -> None:
    """Compute LLM Foundry's results for all options and schemes, in its environment, and write them to `folder`."""
    import llmfoundry  # type: ignore[import-not-found]
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM  # type: ignore[import-not-found]

    def call(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=inputs["tokens"], sequence_id=inputs.get("documents")).logits

    for option, part in OPTIONS.items():
        option_folder = folder / file_name(option)
        model = MPTForCausalLM(MPTConfig(**model_block(part)))
        model.load_state_dict(load_file(option_folder / "weights.safetensors"))
        model.save_pretrained(option_folder / "folder")
        exact, low = compute_twice(model, load_file(option_folder / "inputs.safetensors"), call)
        save_file(exact, option_folder / "exact.safetensors")
        save_file(low, option_folder / "low.safetensors")
    for scheme, init in INITS.items():
        torch.manual_seed(3)
        model = MPTForCausalLM(MPTConfig(**model_block({"init_config": init}, INIT_BASE)))
        # As for a model on the meta device, which is how LLM Foundry trains.
        model.apply(model.param_init_fn)
        (folder / f"init-{file_name(scheme)}.json").write_text(
            json.dumps(describe_distributions(dict(model.named_parameters())))
        )
    versions = {"llmfoundry": llmfoundry.__version__, "torch": torch.__version__}
    (folder / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main()
