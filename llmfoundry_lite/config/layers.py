"""YAML files and `key=value` arguments as layers, laid over each other: files in order < arguments, then `${…}`.

A layer keeps its source, so that every message can name the file. Inside `naming_source` a message begins with its key;
what looks at sources itself stands outside of it. An overlay may set only what hardware decides.
"""

import contextlib
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import MarkedYAMLError, YAMLError

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import MAX_YAML_BYTES, read_at_most
from llmfoundry_lite.config.auto_hardware import AUTO, choose_overlay
from llmfoundry_lite.config.fields import schema_keys, settings_along
from llmfoundry_lite.config.replayed import PLAIN_COMPILE_KEYS
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.shipped import find_yaml, near_name, shipped_folder
from llmfoundry_lite.config.written import FromEnvironment, choose_readings
from llmfoundry_lite.config.yaml_text import read_yaml
from llmfoundry_lite.errors import ConfigError, nearest

OBJECTS = {"allow_objects": True}
"""Flag that lets OmegaConf carry our PlainScalar."""


class Layer(NamedTuple):
    source: str
    """A file's name, or `command line`."""
    values: dict[str, Any]
    note: str = ""
    """Reason why `hardware=auto` has chosen this file; else empty."""
    is_overlay: bool = False


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


def read_layers(
    arguments: Sequence[str],
    *,
    check_overlays: bool = True,
    for_training: bool = True,
    given: Mapping[str, Any] | None = None,
) -> list[Layer]:
    """Return a layer for each file, then the overlay of `hardware=NAME` or `hardware=auto`, then one layer for all
    other `key=value` arguments. `given`, a program's configuration, lies below all files. Raises ConfigError.

    Evaluations have no overlays, and need no file.
    """
    layers = [Layer(GIVEN, dict(given))] if given is not None else []
    overlays: list[Layer] = []
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
            hint = f"; did you mean {near}?" if (near := near_name(argument)) else ""
            raise ConfigError(f"command line: {argument!r} is neither a .yaml file nor key=value{hint}")
    if for_training and not layers:
        raise ConfigError("command line: no YAML file given; try mpt-quickstart, which comes with the package")
    layers += overlays
    if check_overlays:
        layers = [_check_overlay(layer, is_first=layer is layers[0]) for layer in layers]
    if dotlist:
        layers.append(Layer(COMMAND_LINE, _read_dotlist(dotlist)))
        if "overlay" in layers[-1].values:
            raise ConfigError("command line: overlay: belongs into a YAML file, whose keys it limits")
    if for_training:
        _name_eval_loaders(layers)
    return layers


def is_key_value(argument: str) -> bool:
    return re.match(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*=", argument) is not None


def is_yaml(argument: str) -> bool:
    """Return whether the argument is a file, or a YAML that comes with the package, such as `mpt-1b` or `h100-8`."""
    return argument.endswith((".yaml", ".yml")) or find_yaml(argument) is not None


def _read_dotlist(arguments: Sequence[str]) -> dict[str, Any]:
    tree = OmegaConf.create({}, flags=OBJECTS)
    for argument in arguments:
        key, _, text = argument.partition("=")
        if not text.strip():  # of a shell's variable that is not set
            raise ConfigError(f"command line: {key}: nothing given after =; give a value, or null to leave it out")
        try:
            # YAML would read the beginning of a mapping in `{run_name}/x`, a folder, and a comment in `a #1`.
            value = text if re.match(r"\{run_name\}|\{\w*\}[\w./-]|#|[^\s\"'\[{].*\s#", text) else read_yaml(text)
            _refuse_text_lost_by_yaml(key, text, value)
            OmegaConf.update(OmegaConf.create({}, flags=OBJECTS), key, value)
        except (OmegaConfBaseException, YAMLError, UnicodeEncodeError) as error:
            raise ConfigError(f"command line: cannot read {argument}: {_one_line(error)}") from None
        try:
            OmegaConf.update(tree, key, value)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            key = getattr(error, "full_key", None) or "a key"
            raise ConfigError(f"command line: {key}: given both as a list and as a block; remove one") from None
    return typing.cast(dict[str, Any], OmegaConf.to_container(tree))


def _refuse_text_lost_by_yaml(key: str, text: str, value: Any) -> None:
    """Raise ConfigError for text of which YAML keeps something else: nothing of `&a` or `---`, and a space for the end
    of a line. Where a shell has put such text, it is a name or a path."""
    given = text.strip()
    if value is None and given.lower() not in ("null", "~"):
        raise ConfigError(f"command line: {key}: {text!r} given, of which YAML reads nothing; write it in quotes")
    if isinstance(value, str) and "\n" in given and given[0] not in "\"'|>":
        raise ConfigError(f"command line: {key}: {text!r} given, several lines; give one, or write them in quotes")


def read_file(name: str) -> Layer:
    """Read a YAML: a file, or one that comes with the package. Raises ConfigError."""
    path = find_yaml(name)
    if path is None:
        names = [other.name for other in Path(name).parent.glob("*.y*ml")]
        near, shipped = nearest(Path(name).name, names), near_name(name, cutoff=0.8)
        meant = str(Path(name).with_name(near)) if near else shipped and f"{shipped}, which comes with the package"
        raise ConfigError((name or "''") + ": no such file" + (f"; did you mean {meant}?" if meant else ""))
    try:
        values = read_yaml(read_at_most(path, MAX_YAML_BYTES, "a YAML file").decode())
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not valid YAML: {_one_line(error)}") from None
    if not values:
        raise ConfigError(f"{name}: the file is empty")
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: expected `key: value` at the top level, found {type(values).__name__}")
    return Layer(name, values)


def _one_line(error: BaseException) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return " ".join(str(error).split("full_key")[0].split())


# ------------------------------------------------------------------------------------- hardware overlays


def is_for_hardware(key: str) -> bool:
    """Return whether an overlay may set a dotted key: one that decides how and from which disks a run is computed."""
    return any(setting.hardware for setting in settings_along(TrainConfig, key))


def hardware_keys() -> list[str]:
    """Return the keys and whole blocks that an overlay may set, short ones first, a stream's as its data set's."""
    found: dict[str, None] = {}
    for key in schema_keys(TrainConfig):
        parts = key.replace(".streams.*", "").split(".")
        keys = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        found |= dict.fromkeys([outer for outer in keys if is_for_hardware(outer)][:1])
    return sorted(found, key=lambda key: key.count("."))


def _read_overlay(name: str) -> Layer:
    """Read an overlay: ours by its name, the user's by its file, or `auto`. Raises ConfigError for another YAML."""
    if name == "auto":
        values, note = choose_overlay()
        if isinstance(values, Path):
            layer = read_file(str(values))._replace(note=note)
            if shipped_folder("yamls").resolve() not in values.parents:
                _refuse_trusted_keys(layer)
            return layer
        return Layer(AUTO, {"overlay": "hardware", **values}, note)
    layer = read_file(name) if is_yaml(name) else None
    if layer is None or layer.values.get("overlay") != "hardware":
        ours = ", ".join(sorted(path.stem for path in (shipped_folder("yamls") / "hardware").glob("*.yaml")))
        raise ConfigError(
            f"command line: hardware: {name!r} is not a hardware overlay; expected auto, a file, or {ours}"
        )
    return layer


def _refuse_trusted_keys(layer: Layer) -> None:
    """Raise ConfigError for an overlay that nobody has named, in a working directory that may be somebody else's, if it
    has keys that start programs, name folders to write into, or connect to other machines."""
    path = Path(layer.source)
    for key in leaf_keys(layer.values):
        block, _, name = key.partition(".")
        may_start_programs = block == "environment" or (
            block == "compile_config" and name not in ("", *PLAIN_COMPILE_KEYS)
        )
        names_places = block == "islands" or ".dataset." in key
        if may_start_programs or names_places:
            raise ConfigError(
                f"{AUTO}: {path} sets {key}, which {AUTO} does not take from the working directory, because nobody has "
                f"named that file; if you trust it, give hardware=yamls/hardware/{path.name}"
            )


def _check_overlay(layer: Layer, *, is_first: bool) -> Layer:
    kind = layer.values.pop("overlay", None)
    if kind is None:
        return layer
    if kind != "hardware":
        raise ConfigError(f"{layer.source}: overlay: {kind!r} is not a kind of overlay; expected hardware")
    if is_first:
        raise ConfigError(f"{layer.source}: a hardware overlay needs a run to lie on; name the run's YAML before it")
    for key in leaf_keys(layer.values):
        if not is_for_hardware(key):
            name = key.partition(".")[0]
            missing = companions.find_missing("blocks")
            if name in missing:
                raise companions.missing(missing[name], f"{layer.source}: {name}")
            raise ConfigError(
                f"{layer.source}: {key}: a hardware overlay may not change what is trained; "
                f"set it in the run's YAML (an overlay may set {', '.join(hardware_keys())})"
            )
    return layer._replace(is_overlay=True)


# ------------------------------------------------------------------------------------- validation loaders


def _name_eval_loaders(layers: Sequence[Layer]) -> None:
    """Turn LLM Foundry's list of validation loaders, under either key, into `eval_loaders`: label -> block. In place.

    A list replaces the loaders of earlier layers, as any list does; so does null. Raises ConfigError.
    """
    for number, (source, values, *_) in enumerate(layers):
        for key, other in (("eval_loader", "eval_loaders"), ("eval_loaders", "eval_loader")):
            given = values.get(key, "")
            if isinstance(given, list):
                if values.get(other) is not None:
                    raise ConfigError(f"{source}: {key}: {other} given too; keep one of them")
                values.pop(other, None)
                values.pop(key)
                values["eval_loaders"] = _by_label(key, given, source)
            elif given is not None:
                continue
            for earlier in layers[:number]:
                earlier.values.pop("eval_loaders", None)
                if given is not None or key == "eval_loader":
                    earlier.values.pop("eval_loader", None)
    single, several = (
        [name for layer in layers if isinstance(layer.values.get(key), dict) for name in layer.values[key]]
        for key in ("eval_loader", "eval_loaders")
    )
    if single and several:
        key = f"eval_loader.{single[-1]}"
        raise ConfigError(
            f"{source_of(key, layers)}: {key}: there are eval_loaders, {', '.join(dict.fromkeys(several))}; "
            f"write eval_loaders.{several[0]}.{single[-1]}, or keep one of eval_loader and eval_loaders"
        )


def _by_label(key: str, loaders: list[Any], source: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for number, loader in enumerate(loaders):
        where = f"{source}: {key}[{number}]"
        if not isinstance(loader, dict):
            raise ConfigError(f"{where}: {loader!r} given, expected a block of `key: value` lines")
        label = str(loader.get("label") or "")
        if not re.fullmatch(r"[^.\[\]\s][^.\[\]\n]*", label):
            given = f"{label!r} given" if label else "missing"
            raise ConfigError(f"{where}.label: {given}; expected a name for its loss without dots, such as wiki")
        if label in named:
            raise ConfigError(f"{where}.label: {label} given twice; each loss needs a name of its own")
        named[label] = {name: value for name, value in loader.items() if name != "label"}
    return named


# ------------------------------------------------------------------------------------------------ merging


def merge_layers(layers: Sequence[Layer], block: type) -> dict[str, Any]:
    """Lay later layers over earlier ones, resolve `${…}`, read scalars as `block` wants them. Raises ConfigError."""
    _refuse_unfilled(layers)
    _refuse_unused_variables(layers)
    given = [layer.values for layer in layers]
    for number in range(len(given)):
        for later in given[number + 1 :]:
            given[number] = _without_other_kinds(given[number], later)
    try:
        merged = OmegaConf.merge(*(OmegaConf.create(values, flags=OBJECTS) for values in given))
        resolved = OmegaConf.to_container(merged, resolve=True)
        if re.search(r"\$\{\s*oc\.", str(given)):
            resolved = _mark(resolved, _resolve_as_written(merged))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        problem = _one_line(error)
        if missing := re.search(r"Interpolation key '(.+)' not found", str(error)):
            known = sorted({key for layer in layers for key in leaf_keys(layer.values)})
            near = nearest(missing[1], known)
            problem = f"${{{missing[1]}}} names nothing" + (f"; did you mean ${{{near}}}?" if near else "")
        elif unset := re.search(r"Environment variable '(.+)' not found", str(error)):
            problem = f"the environment variable {unset[1]} is not set; export it"
        raise ConfigError(f"{source_of(key, layers)}: {key or 'configuration'}: {problem}") from None
    with naming_source(layers):
        return choose_readings(block, typing.cast(dict[str, Any], resolved))


def _refuse_unfilled(layers: Sequence[Layer]) -> None:
    """Raise ConfigError for `???`, which stands for a value that a later layer must give. Where it is the last word,
    OmegaConf would take an earlier layer's value, or the text itself."""
    for number, layer in enumerate(layers):
        for key in leaf_keys(layer.values):
            is_filled = any(_gives(later.values, key) for later in layers[number + 1 :])
            if get(layer.values, key)[1] == UNFILLED and not is_filled:
                raise ConfigError(f"{layer.source}: {key}: {UNFILLED} stands for a value that must be given; give one")


def _refuse_unused_variables(layers: Sequence[Layer]) -> None:
    """Raise ConfigError for a variable that the command line sets and no `${…}` names. A sweep over it would train the
    same run each time. In a YAML file it is no mistake: several files may share their variables."""
    arguments = next((layer for layer in layers if layer.source == COMMAND_LINE), None)
    variables = get(arguments.values, "variables")[1] if arguments is not None else None
    if not isinstance(variables, dict):
        return
    references = [text for layer in layers for text in _texts(layer.values) if "${" in text]
    if any(re.search(r"\$\{\s*variables\s*\}", text) for text in references):
        return  # the whole block

    # A reference may be relative, or end at a block around the variable, so one common name is enough.
    named = {name for text in references for name in re.findall(r"[\w-]+", text)}
    for key in leaf_keys(variables):
        if named.isdisjoint(key.split(".")) and key not in VARIABLES_OF_OURS:
            meant = [name for text in references for name in re.findall(r"variables\.([\w.-]+)", text)]
            near = nearest(key, meant)
            hint = f"; did you mean variables.{near}?" if near else "; set the key itself"
            raise ConfigError(
                f"{COMMAND_LINE}: variables.{key}: no value names ${{variables.{key}}}, so it has no effect{hint}"
            )


def _texts(values: Any) -> Iterator[str]:
    """Yield every value within blocks and lists, as text."""
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _texts(value)
    else:
        yield str(values)


def _gives(values: dict[str, Any], key: str) -> bool:
    """Return whether `values` has a dotted key, or something else than a block in the place of one around it."""
    inside: Any = values
    for part in key.split("."):
        if not isinstance(inside, dict):
            return True
        if part not in inside:
            return False
        inside = inside[part]
    return True


def _resolve_as_written(merged: Any) -> Any:
    """Resolve everything except `${oc.env:…}`; that too where it names a key, as in `${paths.${oc.env:CLUSTER}}`."""
    choosing: set[str] = set()
    while True:
        try:
            with _variables_as_written(choosing):
                return OmegaConf.to_container(merged, resolve=True)
        except OmegaConfBaseException as error:
            found = set(re.findall(r"\$\{oc\.env:([^,{}]+)", str(error))) - choosing
            if not found:
                raise
            choosing |= found


@contextlib.contextmanager
def _variables_as_written(choosing: Collection[str]) -> Iterator[None]:
    """Let `${oc.env:…}`, and `${oc.decode:…}` around it, resolve to themselves, except for variables in `choosing`."""
    register = getattr(OmegaConf, "register_resolver", OmegaConf.register_new_resolver)

    def as_written(name: str) -> Callable[..., str | None]:
        def resolve(*given: Any) -> str | None:
            if name == "env" and given[0] in choosing:
                return oc.env(*given)
            return f"${{oc.{name}:{','.join(map(_argument, given))}}}"

        return resolve

    def select(key: str, *default: Any, _parent_: Any) -> Any:
        if "${oc." in key:
            raise InterpolationKeyError(f"oc.select: {key}")
        return oc.select(key, *default, _parent_=_parent_)

    try:
        for name in ("env", "decode"):
            register(f"oc.{name}", as_written(name), replace=True)
        register("oc.select", select, replace=True)
        yield
    finally:
        for name in ("env", "decode", "select"):
            register(f"oc.{name}", getattr(oc, name), replace=True)


def _argument(value: Any) -> str:
    if value is None:
        return "null"
    is_plain = str(value).startswith("${oc.") or re.fullmatch(r"[\w./:@%+-]*", str(value))
    return str(value) if is_plain else "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"


def _mark(resolved: Any, written: Any) -> Any:
    """Return `resolved`, where text from the environment is marked and keeps what `written` has in its stead."""
    if isinstance(resolved, dict):
        parts = written if isinstance(written, dict) else dict.fromkeys(resolved, written)
        return {key: _mark(value, parts.get(key)) for key, value in resolved.items()}
    if isinstance(resolved, list):
        parts = written if isinstance(written, list) else [written] * len(resolved)
        return [_mark(*pair) for pair in zip(resolved, parts, strict=True)]
    return FromEnvironment(resolved, str(written)) if isinstance(resolved, str) and resolved != written else resolved


def _without_other_kinds(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Drop blocks where `later` has a list, and lists where it has a block, which OmegaConf does not merge."""
    kept = {}
    for key, value in values.items():
        other = later.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            value = _without_other_kinds(value, other)
        elif isinstance(value, dict | list) and isinstance(other, dict | list) and type(value) is not type(other):
            continue
        kept[key] = value
    return kept


def lay_over(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return `values`, overridden by `later`. Nothing is resolved, because a recorded configuration is data."""
    kept = {**values, **later}
    for key in values.keys() & later.keys():
        if isinstance(values[key], dict) and isinstance(later[key], dict):
            kept[key] = lay_over(values[key], later[key])
    return kept


# ---------------------------------------------------------------------------------- keys as dotted paths


def source_of(key: str, layers: Sequence[Layer]) -> str:
    """Return the source of the last layer that has `key`, or the nearest block around it."""
    parts = re.sub(r"\[\d+\]", "", key).split(".") if key else []
    for length in range(len(parts), 0, -1):
        for layer in reversed(layers):
            if get(layer.values, ".".join(parts[:length]))[0]:
                return layer.source
    return layers[0].source if layers else "configuration"


@contextlib.contextmanager
def naming_source(layers: Sequence[Layer]) -> Iterator[None]:
    """Prefix a ConfigError with its key's source: `d_model: 0 given, …` becomes `run.yaml: d_model: 0 given, …`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source_of(str(error).partition(': ')[0], layers)}: {error}") from None


def get(values: Any, key: str) -> tuple[bool, Any]:
    """Return whether `values` has a dotted key, and its value."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False, None
        values = values[part]
    return True, values


def pop(values: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    for part in parents:
        values = values[part]
    values.pop(last)


def leaf_keys(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys += leaf_keys(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]
    return keys
