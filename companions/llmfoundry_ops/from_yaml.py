"""`llmfoundry-lite init DATA --like RUN.yaml`: writes a YAML for prepared data from one of LLM Foundry, or of our own.

What a launch accepts is kept, and the blocks about the data are replaced. Keys that have no effect here are left out.
Keys that a launch refuses become comments, with what to use instead. Names that LLM Foundry takes from a registry are
kept, with a comment that says what to write. Then the YAML is loaded as a launch loads it.

The YAML may be somebody else's, so it is data: it is read by the loader of configurations, which builds plain values
and stops at a size, no environment variable is read into the new YAML, and no code that it names is imported.

`write_from_yaml` is the story. `registries.py` has the table of registries, and `commented_yaml.py` writes comments.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_lite.config.build import find_unknown_keys
from llmfoundry_lite.config.fields import keys_of, settings_along
from llmfoundry_lite.config.foundry import (
    drop_keys,
    drop_values_without_effect,
    drop_variables,
    find_left_out_keys,
    refuse_fine_tuning,
)
from llmfoundry_lite.config.layers import ConfigLayer, find_value, leaf_keys, naming_source, read_layers, remove_key
from llmfoundry_lite.config.load_train import MergedFiles, load_train_config
from llmfoundry_lite.config.merge import merge_layers, resolve_layer
from llmfoundry_lite.config.own_arguments import collect_own_arguments, collect_part_arguments
from llmfoundry_lite.config.part_names import spell_out_names
from llmfoundry_lite.config.scalars import map_texts
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.yaml_text import read_yaml
from llmfoundry_lite.errors import ConfigError, printable
from llmfoundry_lite.own_code import PREFIX, is_own
from llmfoundry_ops.commented_yaml import Comment, path_of, write_commented
from llmfoundry_ops.registries import RegistryPart, find_parts_from_registries
from llmfoundry_ops.starter import (
    TRAINING_DATA,
    VALIDATION_DATA,
    Facts,
    check_places,
    default_run_name,
    fitting_batch,
    launch_command,
    note_on_validation,
    write_yaml,
    yaml_scalar,
)

OF_DATA = ("tokenizer", "train_loader", "eval_loader", "eval_loaders")
"""Blocks that DATA replaces."""
OF_VALIDATION = ("eval_interval", "eval_first", "eval_subset_num_batches", "device_eval_batch_size")
"""Keys that go if there is no validation data and no task."""
HEAD = """\
# {like}, for {data}. Train it, with a rank for each GPU (-n) if there are several:
#   {launch}
# Everything can be changed on the command line too: optimizer.lr=3e-4

"""
DEFAULT_SEED = keys_of(TrainConfig)["seed"].default
MAX_DEPTH = 20
"""Maximum depth of the blocks and lists of another YAML. A run's YAML needs 7."""
EXAMPLE = f"{PREFIX}package.module:Thing"
"""Form of the line that names a part of a registry."""


@dataclass(kw_only=True, slots=True)
class Findings:
    """Parts and keys of a YAML that are not copied as they are."""

    parts: list[RegistryPart] = field(default_factory=list)
    """Names from registries."""
    replaced_parts: list[RegistryPart] = field(default_factory=list)
    """Loaders from registries, in whose place the data is read by ours."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Dotted key that a launch would refuse -> what to use instead. It becomes a comment."""
    without_effect: dict[str, str] = field(default_factory=dict)
    """Dotted key that is dropped -> the reason."""
    replaced: list[str] = field(default_factory=list)
    """Clauses about values that DATA decides, such as `max_seq_len 64 for 2048`."""


def write_from_yaml(data: Path, like: str, out: Path | None) -> tuple[Path, list[str]]:
    """Write a YAML that trains what another YAML describes, on prepared data.

    data: a folder that `data prepare` has made.
    like: a YAML of a training run, of LLM Foundry or of our own.
    out: path of the new YAML, or None for the default name.

    Returns the new YAML's path, and lines that say what was replaced, what was left out, and what has to be named.
    Raises DataError for data that was not prepared, and ConfigError for a file at the new path, and for a YAML that
    cannot be read, that describes no training, or whose model is not an MPT.
    """
    out = out or Path(f"{Path(like).stem}-{data.resolve().name}.yaml")
    facts = check_places(data, out)
    layer = read_layers([like])[0]
    check_texts(layer.values, like)
    values = resolve_layer(layer, TrainConfig)
    check_is_run(values, like)
    with naming_source([layer]):
        refuse_fine_tuning(values)
    check_is_mpt(values, like)

    findings = examine(values, layer)
    replace_data(values, facts, out, findings)
    text = render(values, findings, data, like, out, facts)
    refusal = find_refusal(text, findings.parts, str(out))
    write_yaml(out, text)
    return out, describe(values, findings, facts, text, refusal)


def check_texts(value: Any, like: str, depth: int = 0) -> None:
    """Raise ConfigError for a YAML that could not be written again line by line, with comments at its keys.

    It may be somebody else's. A key must be found by its dotted name, and a character that ends a line for YAML, but
    not for Python, could turn a comment into a key.
    """
    if depth > MAX_DEPTH:
        raise ConfigError(f"--like: {like}: blocks lie {depth} deep in each other, expected at most {MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            is_plain = not isinstance(key, str) or is_own(key) or re.fullmatch(r"[\w /@+:-]{1,100}", key)
            if not is_plain or not str(key).isprintable():
                raise ConfigError(
                    f"--like: {like}: the key {str(key)[:100]!r} cannot be copied, expected letters, digits, _ and -, "
                    "at most 100 of them; rename it"
                )
            check_texts(item, like, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_texts(item, like, depth + 1)
    elif isinstance(value, str) and not value.replace("\n", "").replace("\t", "").isprintable():
        raise ConfigError(f"--like: {like}: {value[:100]!r} has a control character; remove it")


def check_is_run(values: dict[str, Any], like: str) -> None:
    """Raise ConfigError for a YAML that describes an evaluation, or no run at all."""
    is_evaluation = "train_loader" not in values and ("models" in values or "icl_tasks" in values)
    if is_evaluation:
        raise ConfigError(
            f"--like: {like} describes an evaluation, expected a training run; `llmfoundry-lite eval {like}` takes it"
        )
    if not isinstance(values.get("model"), dict):
        raise ConfigError(f"--like: {like} has no block `model`, expected the YAML of a training run")


def check_is_mpt(values: dict[str, Any], like: str) -> None:
    """Raise ConfigError for a YAML whose model is from another of LLM Foundry's classes than MPT."""
    model = values["model"]
    name = model.get("name")
    if name in (None, "mpt_causal_lm"):
        return
    pretrained = model.get("pretrained_model_name_or_path")
    if pretrained:
        raise ConfigError(
            f"--like: {like}: model.name: {name} loads {pretrained}, a Hugging Face model; to train on from its "
            f"weights, give --like hf:{pretrained}, or the folder of the model"
        )
    raise ConfigError(
        f"--like: {like}: model.name: {name!r} is no MPT; expected mpt_causal_lm, whose norms, feed-forward layers and "
        "attention may be your own (docs/own-parts.md)"
    )


# ------------------------------------------------------------------------------------------------ what to leave out


def examine(values: dict[str, Any], layer: ConfigLayer) -> Findings:
    """Find what a launch would refuse or ignore in a YAML. Removes from `values` what has no effect.

    The checks of a launch are called in its order, on a copy in which each part from a registry has a valid name, so
    that the part's arguments are not taken for unknown keys.
    """
    notes = drop_values_without_effect(values, [layer])
    findings = Findings()
    with naming_source([layer]):
        parts = find_parts_from_registries(values)
    for part in parts:
        if part.path[0] in OF_DATA:
            findings.replaced_parts.append(part)
        else:
            findings.parts.append(part)
    for part in findings.parts:
        if not part.registry.has_counterpart:
            findings.left_out[part.key] = about(part)

    probe, _ = spell_out_names(with_stand_ins(values, findings.parts))
    for key in findings.left_out:
        remove_key(probe, key)
    collect_part_arguments(probe)
    keys_before = leaf_keys(probe)
    notes += drop_keys(probe, [layer])
    findings.left_out |= dict(find_left_out_keys(probe))
    drop_variables(probe, [layer], TrainConfig)

    for note in notes:
        key, _, reason = note.removeprefix(f"{layer.source}: ").partition(" has no effect: ")
        findings.without_effect[key] = reason
    for key in set(keys_before) - set(leaf_keys(probe)):
        if find_value(values, key)[0]:
            remove_key(values, key)

    for key in findings.left_out:
        if find_value(probe, key)[0]:
            remove_key(probe, key)
    collect_own_arguments(probe)
    for key, suggestion in find_unknown_keys(TrainConfig, probe):
        findings.left_out[key] = f"there is no such key; {suggestion}"

    # DATA replaces these blocks, and what is in them.
    for noted in (findings.left_out, findings.without_effect):
        for key in [key for key in noted if key.partition(".")[0] in OF_DATA]:
            del noted[key]
    return findings


def about(part: RegistryPart) -> str:
    """Say what a name from a registry is, and whether the part works unchanged, or what to use instead of it."""
    if not part.registry.has_counterpart:
        return f"from the registry {part.registry.name}, which has no counterpart here: {part.registry.advice}"
    if part.is_theirs:
        instead = settings_along(TrainConfig, part.key)[-1].instead
        return f"LLM Foundry's own: {instead.replace(PREFIX, EXAMPLE)}"
    return f"from the registry {part.registry.name}, {part.registry.advice}"


def describe_part(part: RegistryPart) -> str:
    """Return the comment above a part that has to be named, or whose name has no effect until then."""
    if part.is_theirs:
        return f"{part.name} is {about(part)}."
    consequence = "A launch is refused until then." if part.is_needed else "It is not computed until then."
    return (
        f"{part.name} is {about(part)}. Write {EXAMPLE}, or install a companion that has the name {part.name}. "
        f"{consequence}"
    )


def with_stand_ins(values: dict[str, Any], parts: list[RegistryPart]) -> dict[str, Any]:
    """Return a copy of `values` in which each part from a registry that has a counterpart has an import path."""
    changed = map_texts(values, lambda text: text)  # a copy of all blocks and lists
    for part in parts:
        if not part.registry.has_counterpart:
            continue
        class_name = re.sub(r"\W", "_", part.name)
        import_path = f"{PREFIX}package.module:{class_name}"
        container: Any = changed
        for step in part.path[:-1]:
            container = container[step]
        if part.is_key:
            items = [(import_path if name == part.name else name, value) for name, value in container.items()]
            container.clear()
            container.update(items)
        else:
            container[part.path[-1]] = import_path
    return changed


# ----------------------------------------------------------------------------------------------- what DATA decides


def replace_data(values: dict[str, Any], facts: Facts, out: Path, findings: Findings) -> None:
    """Replace in `values` what prepared data decides: lengths, ids, the batch's size if it has too few samples.

    The blocks of OF_DATA stay as they are; `render` writes others in their place. Adds a clause for each change to
    `findings.replaced`.
    """
    values.pop("variables", None)
    if not values.get("run_name"):
        values["run_name"] = default_run_name(out)
    findings.replaced += [key for key in OF_DATA if values.get(key)]
    values.setdefault("tokenizer", {})
    values.setdefault("train_loader", {})
    if values.pop("eval_loaders", None):
        values["eval_loader"] = {}

    def replace(block: dict[str, Any], key: str, value: int) -> None:
        """Set a key of a block, and note it if the block has another value."""
        if key in block and block[key] != value:
            findings.replaced.append(f"{key} {value} for {block[key]}")
        block[key] = value

    model = values["model"]
    replace(values, "max_seq_len", facts.max_seq_len)
    model["max_seq_len"] = facts.max_seq_len
    vocab_size = model.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < facts.vocab_size:
        replace(model, "vocab_size", facts.vocab_rounded)
    batch_size = values.get("global_train_batch_size")
    if isinstance(batch_size, int) and batch_size > facts.num_train:
        replace(values, "global_train_batch_size", fitting_batch(batch_size, facts.num_train))
    values.setdefault("seed", DEFAULT_SEED)  # the order of the data has it, too

    is_evaluated = facts.num_val or values.get("icl_tasks")
    if not is_evaluated:
        for key in OF_VALIDATION:
            if values.pop(key, None) is not None:
                findings.without_effect[key] = "the data has no validation split, and there are no tasks"


# --------------------------------------------------------------------------------------------------- the new YAML


def render(values: dict[str, Any], findings: Findings, data: Path, like: str, out: Path, facts: Facts) -> str:
    """Return the text of the new YAML. The arguments are as in `write_from_yaml`."""
    comments = []
    for key, instead in findings.left_out.items():
        comments.append(Comment(path=path_of(key), text=f"Left out: {instead}", is_disabling=True))
    for part in findings.parts:
        if part.key not in findings.left_out:
            comments.append(Comment(path=part.path, text=describe_part(part)))
    vocabulary = f"At least the {facts.vocab_size} ids of the data's tokenizer; a multiple of 128 is faster."
    comments.append(Comment(path=("model", "vocab_size"), text=vocabulary))

    # Text that depends on the environment is written as it was.
    written = map_texts(values, lambda text: getattr(text, "written", text))
    blocks = {**TRAINING_DATA, "eval_loader": VALIDATION_DATA if facts.num_val else ""}
    body = write_commented(written, blocks, comments)
    # The samples are as long as the model reads, in one place.
    body = re.sub(r"(?ms)^(model:\n.*?^  max_seq_len:) \d+$", r"\1 ${max_seq_len}", body)

    text = HEAD.format(like=printable(like), data=printable(str(data)), launch=launch_command(out))
    text += f"variables:\n  data: {yaml_scalar(str(data))}\n\n{body}"
    if findings.without_effect:
        text += "\n# Keys of the other YAML that have no effect here:\n"
        for key, reason in findings.without_effect.items():
            text += printable(f"#   {key}: {reason}") + "\n"
    return text


def find_refusal(text: str, parts: list[RegistryPart], name: str) -> str:
    """Load a YAML as a launch does, with import paths in place of the `parts`. Returns the error; empty without any.

    `name` is that of its file, for the error. Nothing that the YAML names is imported.
    """
    try:
        written = with_stand_ins(read_yaml(text), parts)
        values, _ = spell_out_names(written)
        layers = [ConfigLayer(name, values)]
        load_train_config([name], merged=MergedFiles(layers, merge_layers(layers, TrainConfig), {}))
    except ConfigError as error:
        return str(error)
    return ""


def describe(values: dict[str, Any], findings: Findings, facts: Facts, text: str, refusal: str) -> list[str]:
    """Return the lines to print about a new YAML, which is `text`. The last line says how long it trains."""
    lines = [f"taken from the data: {', '.join(findings.replaced)}"]
    lines += [f"our loader reads it, and not {part} ({about(part)})" for part in findings.replaced_parts]
    if findings.without_effect:
        lines.append(f"{count_keys(findings.without_effect)} without effect here, left out")
    keys_of_parts = {part.key for part in findings.parts}
    other_keys = [key for key in findings.left_out if key not in keys_of_parts]
    if other_keys:
        lines.append(f"{count_keys(other_keys)} that a launch refuses, now comments with what to use instead")

    absent = [part for part in findings.parts if not part.registry.has_counterpart]
    if absent:
        lines.append("parts without a counterpart here, now comments:")
        lines += [f"  {part} ({about(part)})" for part in absent]
    others = [part for part in findings.parts if part.registry.has_counterpart]
    if others:
        lines.append(f"parts from registries: write {EXAMPLE} for each, or install a companion that has the name:")
        lines += [f"  {part} ({about(part)})" for part in others]

    code = find_own_code(text)
    if code:
        lines.append(f"a launch runs the code that this YAML names: {', '.join(code)}")
    needed = [part.key for part in findings.parts if part.is_needed]
    if needed:
        lines.append(f"a launch is refused until these are named: {', '.join(needed)}")
    if refusal:
        lines.append(f"a launch is refused: {refusal}")
    lines.append(f"trains for {describe_length(values, facts)}")
    return lines


def find_own_code(text: str) -> list[str]:
    """Return the import paths in the text of a YAML, without those in its comments."""
    without_comments = re.sub(r"(?m)^ *#.*$", "", text)
    return list(dict.fromkeys(re.findall(rf"{PREFIX}[\w.]+:\w+", without_comments)))


def count_keys(keys: Collection[str]) -> str:
    """Return the number of keys and their names: `2 keys (a, b)`."""
    return f"{len(keys)} {'key' if len(keys) == 1 else 'keys'} ({', '.join(keys)})"


def describe_length(values: dict[str, Any], facts: Facts) -> str:
    """Return how long a run trains: its `max_duration`, and the epochs of the data if that is in batches."""
    duration = str(values.get("max_duration"))
    num_batches = re.fullmatch(r"(\d+)ba", duration)
    batch_size = values.get("global_train_batch_size")
    if num_batches and isinstance(batch_size, int):
        num_epochs = int(num_batches[1]) * batch_size / facts.num_train
        return f"{duration}, {num_epochs:,.1f} epochs of the data{note_on_validation(facts)}"
    return f"{duration}{note_on_validation(facts)}"
