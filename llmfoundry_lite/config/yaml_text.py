"""YAML text -> values whose scalars keep their text, and values -> YAML text that reads as the same values.

This is YAML 1.1, as LLM Foundry reads it, with OmegaConf's numbers (`1e-3` is one). 010 and 1:30 are text, because few
expect the 8 and the 90 that YAML 1.1 reads there. Keys are text.
"""

import math
import re
from typing import Any

import yaml
from yaml import YAMLError
from yaml.constructor import ConstructorError, SafeConstructor

from llmfoundry_lite.config.written import PlainScalar, map_texts

INT = "[-+]?(?:0b_*[01][01_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0*[0-7]|[1-9][0-9_]*)"
FLOAT = r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
NOT_FINITE = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
STRING, MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
BEFORE_REFERENCE = re.compile(r"(?<!\\)(\\*)\$\{")
"""`${` and the backslashes before it. The look-behind matters: without it, a megabyte of backslashes takes hours."""
MAX_EXPANSION = 100
"""Values that a document may have with its aliases expanded, for each value that is written."""
MAX_DEPTH = 100
"""Depth of nested blocks. libyaml's reader recurses, and overflows the stack at some thousands."""

_Fastest: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class PlainLoader(_Fastest):
    """Loader of plain values, down to MAX_DEPTH."""

    depth = 0

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YAMLError("nested too deeply")

    def ascend_resolver(self) -> None:
        self.depth -= 1


class Loader(PlainLoader):
    """Loader that keeps the text of plain scalars."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE]
        seen: set[str] = set()
        for key in keys:
            if key.value in seen:
                raise ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
            seen.add(key.value)
        self.flatten_mapping(node)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = STRING
        return super().construct_mapping(node, deep)


def _construct_plain(loader: Loader, node: yaml.ScalarNode) -> Any:
    """Return a number or a truth value with its text. A number that Python cannot hold, such as 5e12345, is text."""
    kind = node.tag.rpartition(":")[2]
    try:
        value = getattr(SafeConstructor, f"construct_yaml_{kind}")(loader, node)
    except (ValueError, KeyError):  # thousands of digits; !!int x
        return node.value
    if kind == "float" and math.isinf(value) and "inf" not in node.value.lower():
        return node.value
    return value if node.style else PlainScalar(node.value, value)


def _tags(*kinds: str) -> list[str]:
    return [f"tag:yaml.org,2002:{kind}" for kind in kinds]


Loader.yaml_constructors = {
    **{tag: Loader.yaml_constructors[tag] for tag in (None, *_tags("str", "null", "seq", "map"))},
    **dict.fromkeys(_tags("bool", "int", "float"), _construct_plain),
}
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag in _tags("null", "bool", "merge")]
    for first, found in Loader.yaml_implicit_resolvers.items()
}


class Dumper(yaml.SafeDumper):
    """Dumper that quotes text where `Loader`, or another reader of YAML 1.1 or 1.2, would read something else."""


for _kind in (Loader, Dumper):
    for _name, _pattern in (("int", INT), ("float", f"{FLOAT}|{NOT_FINITE}")):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$"), list("-+0123456789."))


Dumper.add_implicit_resolver(_tags("int")[0], re.compile("(?:[-+]?[0-9][0-9_]*|0o[0-7]+)$"), list("-+0123456789"))


def read_yaml(text: str | bytes, kind: Any = Loader) -> Any:
    """Read one document. Raises YAMLError, also for aliases that would fill the memory."""
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_aliases(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_aliases(node: yaml.Node) -> None:
    """Raise ConstructorError for an alias within its own value, and for aliases of aliases that fill the memory."""
    sizes: dict[yaml.Node, int] = {}

    def size(one: yaml.Node, around: tuple[yaml.Node, ...]) -> int:
        if one in around:
            raise ConstructorError(None, None, "an alias within its own value", one.start_mark)
        if one not in sizes:
            children = one.value if isinstance(one, yaml.CollectionNode) else ()
            if isinstance(one, yaml.MappingNode):
                children = [child for pair in one.value for child in pair]
            sizes[one] = 1 + sum(size(child, (*around, one)) for child in children)
        return sizes[one]

    if size(node, ()) > MAX_EXPANSION * len(sizes):
        raise ConstructorError(
            None, None, f"aliases make more than {MAX_EXPANSION} values of each that is written", node.start_mark
        )


def dump_yaml(values: Any) -> str:
    return yaml.dump(values, Dumper=Dumper, sort_keys=False)


def dump_record(config: Any, *, keep_variables: bool = True) -> str:
    """Write a configuration, as `schema.as_dict` gives it, as YAML that a launch reads as the same configuration.

    With `keep_variables` the launch resolves `${oc.env:…}` again; else every `${` is plain text.
    """

    def escape(found: re.Match) -> str:
        is_variable = keep_variables and found.string.startswith("oc.", found.end())
        return found[1] * 2 + ("${" if is_variable else "\\${")

    return dump_yaml(map_texts(config, lambda text: BEFORE_REFERENCE.sub(escape, str(text))))


def read_record(text: str | bytes) -> Any:
    """Read a recorded configuration as data: no `${…}` is resolved. Raises YAMLError."""

    def unescape(found: re.Match) -> str:
        return found[1][: len(found[1]) // 2] + "${"

    return map_texts(read_yaml(text, PlainLoader), lambda one: BEFORE_REFERENCE.sub(unescape, one))


def block_in(config: Any, key: str) -> dict[str, Any]:
    """Return a block of a recorded configuration, which may be anybody's; {} for none, and for what is no block."""
    value = config.get(key) if isinstance(config, dict) else None
    return value if isinstance(value, dict) else {}
