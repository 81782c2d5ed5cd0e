"""YAML files and `key=value` arguments as layers, which are laid over each other: files in order < arguments.

A layer keeps its source, so that every message can name the file. Inside `naming_source` a message begins with its key,
and the source is added; code that names sources itself stands outside of it. An overlay may set only what hardware
decides. `merge_layers` resolves `${…}` (`resolve.py`) and reads scalars by the schema (`scalars.py`).
"""

import contextlib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import MAX_YAML_BYTES, read_at_most
from llmfoundry_lite.config.auto_hardware import AUTO, choose_overlay
from llmfoundry_lite.config.fields import schema_keys, settings_along
from llmfoundry_lite.config.replayed import PLAIN_COMPILE_KEYS
from llmfoundry_lite.config.resolve import OBJECTS, merge_and_resolve
from llmfoundry_lite.config.scalars import read_scalars
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.shipped import find_yaml, near_name, shipped_folder
from llmfoundry_lite.config.yaml_text import read_yaml
from llmfoundry_lite.errors import ConfigError, find_nearest


class ConfigLayer(NamedTuple):
    """The values of one YAML file, or of all `key=value` arguments. Later layers override earlier ones."""

    source: str
    """A file's name, or `command line`."""
    values: dict[str, Any]
    note: str = ""
    """Reason why `hardware=auto` has chosen this file; else empty."""
    is_overlay: bool = False
    """Whether it is a hardware overlay, which may set only keys that do not change what is trained."""


UNFILLED = "???"
"""OmegaConf's mark of a value that must be given."""
GIVEN = "the configuration"
"""Source of a mapping that a program gives."""
COMMAND_LINE = "command line"
"""Source of the `key=value` arguments."""
VARIABLES_OF_OURS = ("tokens_per_second",)
"""Variables that the plan reads without a reference: `init --hours` has measured it."""
HARDWARE = "hardware="
AUTO_NAMES = ("auto", "yamls/hardware/auto", "yamls/hardware/auto.yaml")


TEXT_THAT_YAML_MISREADS = re.compile(r"\{run_name\}|\{\w*\}[\w./-]|#|[^\s\"'\[{].*\s#")
"""Arguments that are text though YAML would read the beginning of a mapping (`{run_name}/x`) or a comment (`a #1`)."""


def read_layers(
    arguments: Sequence[str],
    *,
    check_overlays: bool = True,
    for_training: bool = True,
    given: Mapping[str, Any] | None = None,
) -> list[ConfigLayer]:
    """Read the files and settings of a command line into layers, of which later ones override earlier ones.

    They are `given`, a program's configuration, if there is one; each YAML file, in order; the overlay that
    `hardware=NAME` or `hardware=auto` names; and one layer for all other `key=value` arguments. An evaluation
    (`for_training=False`) has no overlays, and needs no file. `check_overlays=False` accepts overlays unchecked.

    Raises ConfigError.
    """
    layers = [] if given is None else [ConfigLayer(GIVEN, dict(given))]
    overlays: list[ConfigLayer] = []
    dotlist: list[str] = []
    for argument in arguments:
        if for_training and argument.startswith(HARDWARE):
            overlays.append(_read_overlay(argument.removeprefix(HARDWARE)))
        elif for_training and argument in AUTO_NAMES:
            layers.append(_read_overlay("auto"))
        elif is_key_value(argument):
            dotlist.append(argument)
        elif is_yaml(argument):
            layers.append(read_file(argument))
        else:
            near = near_name(argument)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"command line: {argument!r} is neither a .yaml file nor key=value{hint}")
    if for_training and not layers:
        raise ConfigError("command line: no YAML file given; try mpt-quickstart, which comes with the package")

    layers += overlays
    if check_overlays:
        layers = [_check_overlay(layer, is_first=layer is layers[0]) for layer in layers]
    if dotlist:
        values = _read_dotlist(dotlist)
        if "overlay" in values:
            raise ConfigError("command line: overlay: belongs in a YAML file, whose keys it limits")
        layers.append(ConfigLayer(COMMAND_LINE, values))
    if for_training:
        _name_eval_loaders(layers)
    return layers


def is_key_value(argument: str) -> bool:
    """Return whether the argument sets a key, as in `optimizer.lr=1e-3`."""
    return re.match(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*=", argument) is not None


def is_yaml(argument: str) -> bool:
    """Return whether the argument is a file, or a YAML that comes with the package, such as `mpt-1b` or `h100-8`."""
    return argument.endswith((".yaml", ".yml")) or find_yaml(argument) is not None


def _read_dotlist(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key.inner=value` arguments as nested dictionaries. Raises ConfigError.

    Each value is read as YAML. OmegaConf makes the blocks, so later arguments override earlier ones.
    """
    tree = OmegaConf.create({}, flags=OBJECTS)
    for argument in arguments:
        key, _, text = argument.partition("=")
        if not text.strip():  # of a shell's variable that is not set
            raise ConfigError(f"command line: {key}: nothing given after =; give a value, or null to leave it out")
        try:
            value = text if TEXT_THAT_YAML_MISREADS.match(text) else read_yaml(text)
            _refuse_text_lost_by_yaml(key, text, value)
            OmegaConf.update(OmegaConf.create({}, flags=OBJECTS), key, value)  # an error is of this argument alone
        except (OmegaConfBaseException, YAMLError, UnicodeEncodeError) as error:
            raise ConfigError(f"command line: cannot read {argument}: {_one_line(error)}") from None
        try:
            OmegaConf.update(tree, key, value)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            key = getattr(error, "full_key", None) or "a key"
            raise ConfigError(f"command line: {key}: given both as a list and as a block; remove one") from None
    return typing.cast(dict[str, Any], OmegaConf.to_container(tree))


def _refuse_text_lost_by_yaml(key: str, text: str, value: Any) -> None:
    """Raise ConfigError for the text of an argument that YAML does not keep as it is.

    YAML reads `&a` and `---` as nothing, and replaces an end of a line by a space. On a command line such text comes
    from a shell's variable, and was meant as a name or a path. `value` is what YAML has read.
    """
    stripped = text.strip()
    if value is None and stripped.lower() not in ("null", "~"):
        raise ConfigError(f"command line: {key}: {text!r} given, which YAML reads as nothing; write it in quotes")
    is_quoted = stripped[0] in "\"'|>"
    if isinstance(value, str) and "\n" in stripped and not is_quoted:
        raise ConfigError(f"command line: {key}: {text!r} given, several lines; give one, or write them in quotes")


def read_file(name: str) -> ConfigLayer:
    """Read a YAML: a file, or one that comes with the package. Raises ConfigError."""
    path = find_yaml(name)
    if path is None:
        raise ConfigError(f"{name or repr('')}: no such file{_suggest_file(name)}")
    try:
        values = read_yaml(read_at_most(path, MAX_YAML_BYTES, "a YAML file").decode())
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not valid YAML: {_one_line(error)}") from None
    if not values:
        raise ConfigError(f"{name}: the file is empty")
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected `key: value` at the top level, found {type(values).__name__}")
    return ConfigLayer(name, values)


def _suggest_file(name: str) -> str:
    """Return the end of a message about a file that does not exist: a similar name, or empty text."""
    names_beside_it = [other.name for other in Path(name).parent.glob("*.y*ml")]
    near = find_nearest(Path(name).name, names_beside_it)
    if near:
        return f"; did you mean {Path(name).with_name(near)}?"
    shipped = near_name(name, cutoff=0.8)
    return f"; did you mean {shipped}, which comes with the package?" if shipped else ""


def _one_line(error: BaseException) -> str:
    """Return the message of an error of OmegaConf or PyYAML in one line, with line and column if it has them."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split("full_key")[0].split())


# ------------------------------------------------------------------------------------- hardware overlays


def is_for_hardware(key: str) -> bool:
    """Return whether an overlay may set a dotted key: one that decides how and from which disks a run is computed."""
    return any(setting.hardware for setting in settings_along(TrainConfig, key))


def hardware_keys() -> list[str]:
    """Return the keys and whole blocks that a hardware overlay may set, for a message.

    Outer ones come first, and the keys of streams are given as those of the data set.
    """
    outermost: dict[str, None] = {}
    for key in schema_keys(TrainConfig):
        parts = key.replace(".streams.*", "").split(".")
        for length in range(1, len(parts) + 1):
            block_or_key = ".".join(parts[:length])
            if is_for_hardware(block_or_key):
                outermost[block_or_key] = None
                break
    return sorted(outermost, key=lambda key: key.count("."))


def _read_overlay(name: str) -> ConfigLayer:
    """Read an overlay: ours by its name, the user's by its file, or `auto`. Raises ConfigError for another YAML."""
    if name == "auto":
        values, note = choose_overlay()
        if isinstance(values, Path):
            layer = read_file(str(values))._replace(note=note)
            if shipped_folder("yamls").resolve() not in values.parents:
                _refuse_trusted_keys(layer)
            return layer
        return ConfigLayer(AUTO, {"overlay": "hardware", **values}, note)

    layer = read_file(name) if is_yaml(name) else None
    if layer is None or layer.values.get("overlay") != "hardware":
        ours = ", ".join(sorted(path.stem for path in (shipped_folder("yamls") / "hardware").glob("*.yaml")))
        raise ConfigError(
            f"command line: hardware: {name!r} is not a hardware overlay; expected auto, a file, or {ours}"
        )
    return layer


def _refuse_trusted_keys(layer: ConfigLayer) -> None:
    """Raise ConfigError for an overlay that nobody has named, if its keys need trust in its author.

    It lies in a working directory that may be somebody else's. Such keys start programs, name folders to write into, or
    connect to other machines.
    """
    path = Path(layer.source)
    for key in leaf_keys(layer.values):
        block, _, name = key.partition(".")
        names_compiler = block == "compile_config" and name not in ("", *PLAIN_COMPILE_KEYS)
        starts_programs = block == "environment" or names_compiler
        names_places = block == "islands" or ".dataset." in key
        if starts_programs or names_places:
            raise ConfigError(
                f"{AUTO}: {path} sets {key}, which {AUTO} does not take from the working directory, because nobody has "
                f"named that file; if you trust it, give hardware=yamls/hardware/{path.name}"
            )


def _check_overlay(layer: ConfigLayer, *, is_first: bool) -> ConfigLayer:
    """Return a layer, marked as an overlay if its file has the line `overlay: hardware`, which is removed from it.

    Raises ConfigError for an overlay before any other file (`is_first`), because it is no run by itself, and for one
    that sets a key which changes what is trained.
    """
    kind = layer.values.pop("overlay", None)
    if kind is None:
        return layer
    if kind != "hardware":
        raise ConfigError(f"{layer.source}: overlay: {kind!r} is not a kind of overlay; expected hardware")
    if is_first:
        raise ConfigError(f"{layer.source}: a hardware overlay needs a run to lie on; name the run's YAML before it")

    for key in leaf_keys(layer.values):
        if is_for_hardware(key):
            continue
        block = key.partition(".")[0]
        missing = companions.find_missing("blocks")
        if block in missing:
            raise companions.missing(missing[block], f"{layer.source}: {block}")
        raise ConfigError(
            f"{layer.source}: {key}: a hardware overlay may not change what is trained; "
            f"set it in the run's YAML (an overlay may set {', '.join(hardware_keys())})"
        )
    return layer._replace(is_overlay=True)


# ------------------------------------------------------------------------------------- validation loaders


def _name_eval_loaders(layers: Sequence[ConfigLayer]) -> None:
    """Turn LLM Foundry's list of validation loaders, under either key, into `eval_loaders`: label -> block. In place.

    A list replaces the loaders of earlier layers, as any list does, and so does null. Raises ConfigError for a list
    beside the other key, and for a single loader beside several.
    """
    for index, layer in enumerate(layers):
        earlier_layers = layers[:index]
        for key, other in (("eval_loader", "eval_loaders"), ("eval_loaders", "eval_loader")):
            loaders = layer.values.get(key, "")
            if isinstance(loaders, list):
                if layer.values.get(other) is not None:
                    raise ConfigError(f"{layer.source}: {key}: {other} given too; keep one of them")
                layer.values.pop(other, None)
                layer.values.pop(key)
                layer.values["eval_loaders"] = _by_label(key, loaders, layer.source)
            elif loaders is not None:
                continue  # a block, which is laid over that of earlier layers; or the layer has no such key

            replaces_single_loader = loaders is not None or key == "eval_loader"
            for earlier in earlier_layers:
                earlier.values.pop("eval_loaders", None)
                if replaces_single_loader:
                    earlier.values.pop("eval_loader", None)

    keys_of_single = _keys_in_blocks("eval_loader", layers)
    labels = _keys_in_blocks("eval_loaders", layers)
    if keys_of_single and labels:
        last = keys_of_single[-1]
        key = f"eval_loader.{last}"
        raise ConfigError(
            f"{source_of(key, layers)}: {key}: there are eval_loaders, {', '.join(dict.fromkeys(labels))}; "
            f"write eval_loaders.{labels[0]}.{last}, or keep one of eval_loader and eval_loaders"
        )


def _keys_in_blocks(name: str, layers: Sequence[ConfigLayer]) -> list[str]:
    """Return the keys that all layers have in the top-level block `name`."""
    keys: list[str] = []
    for layer in layers:
        block = layer.values.get(name)
        if isinstance(block, dict):
            keys += block
    return keys


def _by_label(key: str, loaders: list[Any], source: str) -> dict[str, Any]:
    """Return the blocks of a list of loaders by their labels, which are removed. Raises ConfigError."""
    blocks: dict[str, Any] = {}
    for index, loader in enumerate(loaders):
        place = f"{source}: {key}[{index}]"
        if not isinstance(loader, dict):
            raise ConfigError(f"{place}: {loader!r} given, expected a block of `key: value` lines")
        label = str(loader.get("label") or "")
        if not re.fullmatch(r"[^.\[\]\s][^.\[\]\n]*", label):
            problem = f"{label!r} given" if label else "missing"
            raise ConfigError(f"{place}.label: {problem}; expected a name for its loss without dots, such as wiki")
        if label in blocks:
            raise ConfigError(f"{place}.label: {label} given twice; each loss needs a name of its own")
        blocks[label] = {name: value for name, value in loader.items() if name != "label"}
    return blocks


# ------------------------------------------------------------------------------------------------ merging


def merge_layers(layers: Sequence[ConfigLayer], block: type) -> dict[str, Any]:
    """Merge layers into the values of one configuration, in which later layers override earlier ones.

    References `${…}` are resolved. `block` is the configuration's dataclass, by whose types text such as `1e-3` is read
    as a number. Raises ConfigError for a reference to nothing, for a value `???` that no layer gives, and for a
    variable of the command line that has no effect.
    """
    _refuse_unfilled(layers)
    _refuse_unused_variables(layers)
    mappings = [layer.values for layer in layers]
    for index in range(len(mappings)):
        for later in mappings[index + 1 :]:
            mappings[index] = _without_other_kinds(mappings[index], later)
    try:
        resolved = merge_and_resolve(mappings)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        problem = _describe_unresolved(error, layers)
        raise ConfigError(f"{source_of(key, layers)}: {key or 'configuration'}: {problem}") from None
    with naming_source(layers):
        return read_scalars(block, resolved)


def _describe_unresolved(error: OmegaConfBaseException, layers: Sequence[ConfigLayer]) -> str:
    """Return for a message why OmegaConf could not resolve a reference `${…}`, and what may have been meant."""
    missing_key = re.search(r"Interpolation key '(.+)' not found", str(error))
    if missing_key:
        known = sorted({key for layer in layers for key in leaf_keys(layer.values)})
        near = find_nearest(missing_key[1], known)
        hint = f"; did you mean ${{{near}}}?" if near else ""
        return f"${{{missing_key[1]}}} names nothing{hint}"
    unset_variable = re.search(r"Environment variable '(.+)' not found", str(error))
    if unset_variable:
        return f"the environment variable {unset_variable[1]} is not set; export it"
    return _one_line(error)


def _refuse_unfilled(layers: Sequence[ConfigLayer]) -> None:
    """Raise ConfigError for `???`, which stands for a value that a later layer must give, where none does.

    OmegaConf would take an earlier layer's value, or the text itself.
    """
    for index, layer in enumerate(layers):
        for key in leaf_keys(layer.values):
            is_filled = any(_gives(later.values, key) for later in layers[index + 1 :])
            if find_value(layer.values, key)[1] == UNFILLED and not is_filled:
                raise ConfigError(f"{layer.source}: {key}: {UNFILLED} stands for a value that must be given; give one")


def _refuse_unused_variables(layers: Sequence[ConfigLayer]) -> None:
    """Raise ConfigError for a variable that the command line sets and no `${…}` names.

    A sweep over it would train the same run each time. In a YAML file it is no mistake, because several files may share
    their variables.
    """
    arguments = next((layer for layer in layers if layer.source == COMMAND_LINE), None)
    variables = find_value(arguments.values, "variables")[1] if arguments is not None else None
    if not isinstance(variables, dict):
        return
    references = [text for layer in layers for text in _texts(layer.values) if "${" in text]
    if any(re.search(r"\$\{\s*variables\s*\}", text) for text in references):
        return  # the whole block

    # A reference may be relative, or end at a block around the variable, so one common name is enough.
    words = {word for text in references for word in re.findall(r"[\w-]+", text)}
    for key in leaf_keys(variables):
        is_named = not words.isdisjoint(key.split("."))
        if is_named or key in VARIABLES_OF_OURS:
            continue
        named_variables = [name for text in references for name in re.findall(r"variables\.([\w.-]+)", text)]
        near = find_nearest(key, named_variables)
        hint = f"; did you mean variables.{near}?" if near else "; set the key itself"
        raise ConfigError(
            f"{COMMAND_LINE}: variables.{key}: no value names ${{variables.{key}}}, so it has no effect{hint}"
        )


def _texts(values: Any) -> Iterator[str]:
    """Yield every value within blocks and lists, as text."""
    if isinstance(values, dict):
        for value in values.values():
            yield from _texts(value)
    elif isinstance(values, list):
        for value in values:
            yield from _texts(value)
    else:
        yield str(values)


def _gives(values: dict[str, Any], key: str) -> bool:
    """Return whether merging `values` later overrides a dotted key: by its own value, or that of a block around it."""
    inside: Any = values
    for part in key.split("."):
        if not isinstance(inside, dict):
            return True
        if part not in inside:
            return False
        inside = inside[part]
    return True


def _without_other_kinds(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return `values` without blocks that `later` replaces by a list, and lists that it replaces by a block.

    OmegaConf refuses to merge a block and a list.
    """
    kept = {}
    for key, value in values.items():
        other = later.get(key)
        are_collections = isinstance(value, dict | list) and isinstance(other, dict | list)
        if isinstance(value, dict) and isinstance(other, dict):
            kept[key] = _without_other_kinds(value, other)
        elif are_collections and type(value) is not type(other):
            continue
        else:
            kept[key] = value
    return kept


def lay_over(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Merge two configurations, of which `later` overrides keys of `values`, without resolving references.

    It is meant for the recorded configuration of a run that somebody else may have made, whose `${…}` must stay text.
    """
    merged = {**values, **later}
    for key in values.keys() & later.keys():
        if isinstance(values[key], dict) and isinstance(later[key], dict):
            merged[key] = lay_over(values[key], later[key])
    return merged


# ---------------------------------------------------------------------------------- keys as dotted paths


def source_of(key: str, layers: Sequence[ConfigLayer]) -> str:
    """Return the name of the file that sets a dotted key, or `command line`, for a message.

    It is that of the last layer that has the key, else that of the last one with the innermost block around it.
    """
    parts = re.sub(r"\[\d+\]", "", key).split(".") if key else []
    for length in range(len(parts), 0, -1):
        key_or_block = ".".join(parts[:length])
        for layer in reversed(layers):
            has_it, _ = find_value(layer.values, key_or_block)
            if has_it:
                return layer.source
    return layers[0].source if layers else "configuration"


@contextlib.contextmanager
def naming_source(layers: Sequence[ConfigLayer]) -> Iterator[None]:
    """Add the file to a ConfigError whose message begins with a key, raised in this context.

    `d_model: 0 given, …` becomes `run.yaml: d_model: 0 given, …`, with the last of the `layers` that has the key.
    """
    try:
        yield
    except ConfigError as error:
        key = str(error).partition(": ")[0]
        raise ConfigError(f"{source_of(key, layers)}: {error}") from None


def find_value(values: Any, key: str) -> tuple[bool, Any]:
    """Look up a dotted key in nested dictionaries. Return whether it is there, and its value, or None if it is not."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False, None
        values = values[part]
    return True, values


def remove_key(values: dict[str, Any], key: str) -> None:
    """Remove a dotted key, which must be there, from nested dictionaries, in place."""
    *blocks, last = key.split(".")
    for block in blocks:
        values = values[block]
    values.pop(last)


def leaf_keys(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of all values in nested dictionaries. An empty dictionary counts as a value."""
    keys: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            keys += leaf_keys(value, f"{prefix}{key}.")
        else:
            keys.append(prefix + key)
    return keys
