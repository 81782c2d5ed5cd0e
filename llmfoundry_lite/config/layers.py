"""Read YAML files and `key=value` arguments as the layers of one configuration.

Later layers override earlier ones: YAML files in order, then hardware overlays, then arguments. A layer keeps the name
of its source, so that every error can name the file in which a key stands. Code that raises errors which begin with a
key runs inside `naming_source`, which adds the file; code that names files itself runs outside of it.

`read_layers` reads the files. An overlay may set only keys that the hardware decides. `merge.py` merges the layers. The
functions at the end look up dotted keys, such as `optimizer.lr`, in nested dictionaries.
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
from llmfoundry_lite.config.resolve import OBJECTS
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.shipped import find_yaml, near_name, shipped_folder
from llmfoundry_lite.config.yaml_text import read_yaml
from llmfoundry_lite.errors import ConfigError, find_nearest
from llmfoundry_lite.own_code import PREFIX, is_own


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
HARDWARE = "hardware="
AUTO_NAMES = ("auto", "yamls/hardware/auto", "yamls/hardware/auto.yaml")


TEXT_THAT_YAML_MISREADS = re.compile(r"\{run_name\}|\{\w*\}[\w./-]|#|[^\s\"'\[{].*\s#")
"""Values of arguments that are text, although YAML would read a mapping (`{run_name}/x`) or a comment (`a #1`)."""


def read_layers(
    arguments: Sequence[str],
    *,
    check_overlays: bool = True,
    for_training: bool = True,
    given: Mapping[str, Any] | None = None,
) -> list[ConfigLayer]:
    """Read the files and `key=value` pairs of a command line into layers, of which later ones override earlier ones.

    `mpt-1b my.yaml hardware=h100-8 seed=3` gives the layers of mpt-1b.yaml, of my.yaml, of the overlay h100-8.yaml, and
    of the command line, `{"seed": 3}`. `given`, the configuration of a program that calls the library, is the first
    layer if there is one. An evaluation (`for_training=False`) has no overlays, and needs no file.
    `check_overlays=False` accepts overlays that set keys which they may not set.

    Raises ConfigError for files and arguments that cannot be read, and for overlays that are refused.
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

    # A YAML file among the others may be an overlay too, by its line `overlay: hardware`.
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
    """Return whether the argument is a YAML file, or the name of one in the package, such as `mpt-1b` or `h100-8`."""
    return argument.endswith((".yaml", ".yml")) or find_yaml(argument) is not None


def _read_dotlist(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` arguments as nested dictionaries. Later arguments override earlier ones.

    `optimizer.lr=1e-3` and `fsdp_config={}` give `{"optimizer": {"lr": 1e-3}, "fsdp_config": {}}`. Each value is read
    as YAML. Raises ConfigError for arguments that cannot be read, and for a key that is both a list and a block.
    """
    merged = OmegaConf.create({}, flags=OBJECTS)
    for argument in arguments:
        key, _, text = argument.partition("=")
        # `run_name=$NAME` leaves nothing after the = if the shell's variable is not set.
        if not text.strip():
            raise ConfigError(f"command line: {key}: nothing given after =; give a value, or null to leave it out")

        # Apply the argument to an empty configuration first, so that an error here is about this argument alone.
        try:
            value = text if TEXT_THAT_YAML_MISREADS.match(text) else read_yaml(text)
            _refuse_text_lost_by_yaml(key, text, value)
            OmegaConf.update(OmegaConf.create({}, flags=OBJECTS), key, value)
        except (OmegaConfBaseException, YAMLError, UnicodeEncodeError) as error:
            raise ConfigError(f"command line: cannot read {argument}: {describe_yaml_error(error)}") from None

        # An error now means that the argument does not go with earlier ones.
        try:
            OmegaConf.update(merged, key, value)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            key = getattr(error, "full_key", None) or "a key"
            raise ConfigError(f"command line: {key}: given both as a list and as a block; remove one") from None
    return typing.cast(dict[str, Any], OmegaConf.to_container(merged))


def _refuse_text_lost_by_yaml(key: str, text: str, value: Any) -> None:
    """Raise ConfigError for a `key=text` argument of which YAML loses a part: `value` is what YAML has read in `text`.

    YAML reads `&a` and `---` as null, and replaces the end of a line by a space. On a command line such text comes from
    a variable of the shell, and was meant as a name or a path.
    """
    stripped = text.strip()
    if value is None and stripped.lower() not in ("null", "~"):
        raise ConfigError(f"command line: {key}: {text!r} given, which YAML reads as nothing; write it in quotes")
    is_quoted = stripped[0] in "\"'|>"
    if isinstance(value, str) and "\n" in stripped and not is_quoted:
        raise ConfigError(f"command line: {key}: {text!r} given, several lines; give one, or write them in quotes")


def read_file(name: str) -> ConfigLayer:
    """Read a YAML file into a layer. `name` is a path, or the name of a YAML in the package, such as `mpt-1b`.

    Raises ConfigError if there is no such file, or if it is not a YAML of `key: value` lines.
    """
    path = find_yaml(name)
    if path is None:
        raise ConfigError(f"{name or repr('')}: no such file{_suggest_file(name)}")
    try:
        values = read_yaml(read_at_most(path, MAX_YAML_BYTES, "a YAML file").decode())
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not valid YAML: {describe_yaml_error(error)}") from None
    if not values:
        raise ConfigError(f"{name}: the file is empty")
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected `key: value` at the top level, found {type(values).__name__}")
    return ConfigLayer(name, values)


def _suggest_file(name: str) -> str:
    """Return the end of the message about a file that does not exist: a similar name, or empty text.

    A YAML in the same folder is suggested before one that comes with the package.
    """
    path = Path(name)
    yamls_in_folder = [file.name for file in path.parent.glob("*.y*ml")]
    nearest = find_nearest(path.name, yamls_in_folder)
    if nearest:
        return f"; did you mean {path.with_name(nearest)}?"
    nearest_shipped = near_name(name, cutoff=0.8)
    return f"; did you mean {nearest_shipped}, which comes with the package?" if nearest_shipped else ""


def describe_yaml_error(error: BaseException) -> str:
    """Return the message of an error of OmegaConf or PyYAML in one line, with line and column if it has them."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem}, line {mark.line + 1}, column {mark.column + 1}"
    # OmegaConf appends lines such as `full_key: optimizer.lr`. Our messages begin with the key.
    message = str(error).split("full_key")[0]
    return " ".join(message.split())


# ------------------------------------------------------------------------------------- hardware overlays


def is_for_hardware(key: str) -> bool:
    """Return whether a hardware overlay may set a dotted key, by the rules of the key and of the blocks around it.

    It may set `fsdp_config.mixed_precision` and `train_loader.num_workers`, which say how and from which disks a run is
    computed, but not `optimizer.lr`.
    """
    return any(setting.hardware for setting in settings_along(TrainConfig, key))


def hardware_keys() -> list[str]:
    """Return the keys that a hardware overlay may set, for a message: `precision`, `fsdp_config`, ...

    If it may set a whole block, the block stands for its keys. Keys of the top level come first. The keys of a stream
    (`train_loader.dataset.streams.*.local`) are given as those of the data set (`train_loader.dataset.local`).
    """
    outermost_keys: dict[str, None] = {}  # a set that keeps its order
    for key in schema_keys(TrainConfig):
        parts = key.replace(".streams.*", "").split(".")
        # Find the outermost block around the key, or the key itself, that an overlay may set.
        for length in range(1, len(parts) + 1):
            block_or_key = ".".join(parts[:length])
            if is_for_hardware(block_or_key):
                outermost_keys[block_or_key] = None
                break
    return sorted(outermost_keys, key=lambda key: key.count("."))


def _read_overlay(name: str) -> ConfigLayer:
    """Read the overlay of `hardware=NAME`: a file, the name of one in the package, or `auto`.

    Raises ConfigError for a YAML that is not an overlay, and for keys that need trust in an overlay which `auto` found.
    """
    if name == "auto":
        values, note = choose_overlay()
        if isinstance(values, Path):
            layer = read_file(str(values))._replace(note=note)
            is_shipped = shipped_folder("yamls").resolve() in values.parents
            if not is_shipped:
                _refuse_trusted_keys(layer)
            return layer
        # There is no overlay for these devices, only a few safe values.
        return ConfigLayer(AUTO, {"overlay": "hardware", **values}, note)

    layer = read_file(name) if is_yaml(name) else None
    if layer is None or layer.values.get("overlay") != "hardware":
        shipped_files = (shipped_folder("yamls") / "hardware").glob("*.yaml")
        shipped_names = sorted(path.stem for path in shipped_files)
        raise ConfigError(
            f"command line: hardware: {name!r} is not a hardware overlay; expected auto, a file, or "
            f"{', '.join(shipped_names)}"
        )
    return layer


def _refuse_trusted_keys(layer: ConfigLayer) -> None:
    """Raise ConfigError if an overlay that `hardware=auto` found in the working directory has keys that need trust.

    The user has not named the file, and the working directory may be somebody else's. Keys that need trust in the
    author are those that can start programs, name folders to write into, or connect to other machines.
    """
    path = Path(layer.source)
    for key in leaf_keys(layer.values):
        block, _, name = key.partition(".")
        names_compiler = block == "compile_config" and name not in ("", *PLAIN_COMPILE_KEYS)
        starts_programs = block == "environment" or names_compiler
        names_places = block == "islands" or ".dataset." in key
        names_code = _may_name_code(layer, key)
        if starts_programs or names_code or names_places:
            raise ConfigError(
                f"{AUTO}: {path} sets {key}, which {AUTO} does not take from the working directory, because nobody has "
                f"named that file; if you trust it, give hardware=yamls/hardware/{path.name}"
            )


def _may_name_code(layer: ConfigLayer, key: str) -> bool:
    """Return whether the value that a layer gives a dotted key may be the import path of code (`python:`).

    A value that is none of ours is an import path, or may become one when its references are resolved.
    """
    settings = settings_along(TrainConfig, key)
    choices = settings[-1].choices if settings else ()
    is_set, value = find_value(layer.values, key)
    return is_set and PREFIX in choices and value not in (*choices, UNFILLED, None)


def refuse_code_of_overlays(layers: Sequence[ConfigLayer], values: Mapping[str, Any]) -> None:
    """Raise ConfigError if a hardware overlay names code of the user's own for the model, or replaces such code.

    The key `attn_impl` is free for overlays because our implementations of attention compute the same. Nobody knows
    that of the user's own. `values` are those of the merged layers.
    """
    for overlay in layers:
        keys = leaf_keys(overlay.values) if overlay.is_overlay else []
        for key in keys:
            layers_with_key = [layer for layer in layers if find_value(layer.values, key)[0]]
            is_overridden = layers_with_key[-1] is not overlay
            if is_overridden:
                continue

            _, value = find_value(values, key)
            if is_own(value):
                raise ConfigError(
                    f"{overlay.source}: {key}: {value} given, but code of your own belongs to the model, and a "
                    "hardware overlay may not change what is trained; set it in the run's YAML"
                )
            layers_of_run = [layer for layer in layers_with_key if not layer.is_overlay]
            if layers_of_run and _may_name_code(layers_of_run[-1], key):
                _, replaced = find_value(layers_of_run[-1].values, key)
                raise ConfigError(
                    f"{overlay.source}: {key}: {value} given, but {replaced} of {layers_of_run[-1].source} belongs to "
                    f"the model, and a hardware overlay may not change what is trained; remove {key} from the overlay, "
                    "or give the one that you want on the command line"
                )


def _check_overlay(layer: ConfigLayer, *, is_first: bool) -> ConfigLayer:
    """Return a layer, with `is_overlay` set if its file has the line `overlay: hardware`, and check that it may be one.

    The line is removed from `layer.values`. Raises ConfigError if an overlay is the first layer (`is_first`), because
    it does not describe a run, and if it sets a key that changes what is trained.
    """
    overlay_type = layer.values.pop("overlay", None)
    if overlay_type is None:
        return layer
    if overlay_type != "hardware":
        raise ConfigError(f"{layer.source}: overlay: {overlay_type!r} is not a kind of overlay; expected hardware")
    if is_first:
        raise ConfigError(f"{layer.source}: a hardware overlay needs a run to lie on; name the run's YAML before it")

    for key in leaf_keys(layer.values):
        if is_for_hardware(key):
            continue
        # The block of a companion that is not installed is unknown here. The error names the companion.
        block = key.partition(".")[0]
        companion_of_block = companions.find_missing("blocks")
        if block in companion_of_block:
            raise companions.missing(companion_of_block[block], f"{layer.source}: {block}")
        raise ConfigError(
            f"{layer.source}: {key}: a hardware overlay may not change what is trained; "
            f"set it in the run's YAML (an overlay may set {', '.join(hardware_keys())})"
        )
    return layer._replace(is_overlay=True)


# ------------------------------------------------------------------------------------- validation loaders


def _name_eval_loaders(layers: Sequence[ConfigLayer]) -> None:
    """Turn LLM Foundry's lists of validation loaders into `eval_loaders`, by label, in the values of all layers.

    The list `eval_loader: [{label: wiki, dataset: …}]` becomes `eval_loaders: {wiki: {dataset: …}}`. A list may stand
    under either key. Like any list, it replaces the validation loaders of earlier layers; null does so too.

    Raises ConfigError for a list beside the other key, and for a single loader beside several.
    """
    for index, layer in enumerate(layers):
        earlier_layers = layers[:index]
        for key, other_key in (("eval_loader", "eval_loaders"), ("eval_loaders", "eval_loader")):
            # A block will be merged with those of earlier layers. So only a list and null have to be treated here.
            if key not in layer.values or isinstance(layer.values[key], dict):
                continue
            loaders = layer.values[key]
            if isinstance(loaders, list):
                if layer.values.get(other_key) is not None:
                    raise ConfigError(f"{layer.source}: {key}: {other_key} given too; keep one of them")
                layer.values.pop(other_key, None)
                layer.values.pop(key)
                layer.values["eval_loaders"] = _loaders_by_label(key, loaders, layer.source)
            elif loaders is not None:
                continue  # neither a list nor a block: the schema refuses it later

            # Remove the validation loaders of earlier layers, which would be merged with the list or null otherwise.
            replaces_single_loader = loaders is not None or key == "eval_loader"
            for earlier in earlier_layers:
                earlier.values.pop("eval_loaders", None)
                if replaces_single_loader:
                    earlier.values.pop("eval_loader", None)

    # A single loader and several cannot be merged, and it is not clear which of them is meant.
    keys_of_single_loader = _keys_in_blocks("eval_loader", layers)
    labels = _keys_in_blocks("eval_loaders", layers)
    if keys_of_single_loader and labels:
        last_key = keys_of_single_loader[-1]
        dotted_key = f"eval_loader.{last_key}"
        raise ConfigError(
            f"{source_of(dotted_key, layers)}: {dotted_key}: there are eval_loaders, "
            f"{', '.join(dict.fromkeys(labels))}; write eval_loaders.{labels[0]}.{last_key}, or keep one of "
            "eval_loader and eval_loaders"
        )


def _keys_in_blocks(name: str, layers: Sequence[ConfigLayer]) -> list[str]:
    """Return the keys in the top-level block `name` of every layer, layer by layer. A key may occur several times."""
    keys: list[str] = []
    for layer in layers:
        block = layer.values.get(name)
        if isinstance(block, dict):
            keys += block
    return keys


def _loaders_by_label(key: str, loaders: list[Any], source: str) -> dict[str, Any]:
    """Return label -> block for a list of loaders, whose `label` is removed from the block.

    `key` is the list's key, and `source` its file, for errors. Raises ConfigError for a label that is missing, that
    cannot be part of a dotted key, or that two loaders have.
    """
    blocks: dict[str, Any] = {}
    for index, loader in enumerate(loaders):
        loader_key = f"{source}: {key}[{index}]"
        if not isinstance(loader, dict):
            raise ConfigError(f"{loader_key}: {loader!r} given, expected a block of `key: value` lines")
        label = str(loader.get("label") or "")
        # The label becomes a part of dotted keys: eval_loaders.wiki.dataset.
        if not re.fullmatch(r"[^.\[\]\s][^.\[\]\n]*", label):
            problem = f"{label!r} given" if label else "missing"
            raise ConfigError(f"{loader_key}.label: {problem}; expected a name for its loss without dots, such as wiki")
        if label in blocks:
            raise ConfigError(f"{loader_key}.label: {label} given twice; each loss needs a name of its own")
        blocks[label] = {name: value for name, value in loader.items() if name != "label"}
    return blocks


# ---------------------------------------------------------------------------------- keys as dotted paths


def source_of(key: str, layers: Sequence[ConfigLayer]) -> str:
    """Return the name of the file that sets a dotted key, or `command line`, for an error message.

    This is the last layer that has the key. If none has it, because the key is missing or a default, it is the last
    layer that has the innermost block around the key, and otherwise the first layer.
    """
    key_without_indices = re.sub(r"\[\d+\]", "", key)  # stages[0].until -> stages.until
    parts = key_without_indices.split(".") if key else []
    for length in range(len(parts), 0, -1):
        key_or_block = ".".join(parts[:length])
        for layer in reversed(layers):
            is_set, _ = find_value(layer.values, key_or_block)
            if is_set:
                return layer.source
    return layers[0].source if layers else "configuration"


@contextlib.contextmanager
def naming_source(layers: Sequence[ConfigLayer]) -> Iterator[None]:
    """Add the name of the file to a ConfigError that is raised in this context, whose message begins with a key.

    `d_model: 0 given, …` becomes `run.yaml: d_model: 0 given, …`, if run.yaml is the last of the `layers` that sets the
    key.
    """
    try:
        yield
    except ConfigError as error:
        key = str(error).partition(": ")[0]
        raise ConfigError(f"{source_of(key, layers)}: {error}") from None


def find_value(values: Any, key: str) -> tuple[bool, Any]:
    """Look up a dotted key in nested dictionaries. Returns (True, its value), or (False, None) if it is not there.

    >>> find_value({"optimizer": {"lr": 0.1}}, "optimizer.lr")
    (True, 0.1)
    """
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
    """Return the dotted keys of all values in nested dictionaries. An empty dictionary counts as a value.

    >>> leaf_keys({"seed": 17, "optimizer": {"lr": 0.1, "kwargs": {}}})
    ['seed', 'optimizer.lr', 'optimizer.kwargs']
    """
    keys: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            keys += leaf_keys(value, f"{prefix}{key}.")
        else:
            keys.append(prefix + key)
    return keys
