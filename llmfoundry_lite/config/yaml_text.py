"""YAML text -> values whose scalars keep their text, and values -> YAML text that reads as the same values.

This is YAML 1.1, as LLM Foundry reads it, with OmegaConf's numbers (`1e-3` is one). 010 and 1:30 are text, because few
expect the 8 and the 90 that YAML 1.1 reads there. Keys are text.

`read_yaml` and `dump_yaml` are for files of a user, `read_record` and `dump_record` for a configuration that a run
records.
"""

import math
import re
from typing import Any

import yaml
from yaml import YAMLError
from yaml.constructor import ConstructorError, SafeConstructor

from llmfoundry_lite.config.scalars import PlainScalar, map_texts

INT = "[-+]?(?:0b_*[01][01_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0*[0-7]|[1-9][0-9_]*)"
FLOAT = r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
NOT_FINITE = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
"""Patterns of numbers: those of YAML 1.1, except octal ones such as 010 and those to base 60. 1e-3 is one, as in
OmegaConf."""

STRING_TAG = "tag:yaml.org,2002:str"
MERGE_TAG = "tag:yaml.org,2002:merge"
INT_TAG = "tag:yaml.org,2002:int"
FLOAT_TAG = "tag:yaml.org,2002:float"

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
        """Count a level of nesting. PyYAML calls this before it reads a node, and `ascend_resolver` after that."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YAMLError("nested too deeply")

    def ascend_resolver(self) -> None:
        self.depth -= 1


class Loader(PlainLoader):
    """Loader that keeps the text of plain scalars."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a dictionary whose keys are text. Raises ConstructorError for a key that stands there twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                continue
            if key.value in seen:
                raise ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
            seen.add(key.value)

        self.flatten_mapping(node)  # keys that `<<` brings, which the block's own override
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = STRING_TAG
        return super().construct_mapping(node, deep)


def _construct_plain(loader: Loader, node: yaml.ScalarNode) -> Any:
    """Return a number or a truth value, with its text where it has no quotes.

    A number that Python cannot hold, such as 5e12345, or one that a tag asks for in vain (`!!int x`), is text.
    """
    kind = node.tag.rpartition(":")[2]
    try:
        value = getattr(SafeConstructor, f"construct_yaml_{kind}")(loader, node)
    except (ValueError, KeyError):  # thousands of digits; !!int x
        return node.value
    has_overflowed = kind == "float" and math.isinf(value) and "inf" not in node.value.lower()
    if has_overflowed:
        return node.value
    is_plain = not node.style
    return PlainScalar(node.value, value) if is_plain else value


def _tags(*kinds: str) -> list[str]:
    """Return PyYAML's tags for kinds of values, such as `int`."""
    return [f"tag:yaml.org,2002:{kind}" for kind in kinds]


# `Loader` makes text, null, lists and mappings as YAML does, and numbers and truth values with their text. It refuses
# any other tag.
Loader.yaml_constructors = {
    **{tag: Loader.yaml_constructors[tag] for tag in (None, *_tags("str", "null", "seq", "map"))},
    **dict.fromkeys(_tags("bool", "int", "float"), _construct_plain),
}
# It recognises null, truth values and merge keys as YAML 1.1 does. Numbers are ours, and dates are text.
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _tags("null", "bool", "merge")]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}


class Dumper(yaml.SafeDumper):
    """Dumper that quotes text where `Loader`, or another reader of YAML 1.1 or 1.2, would read something else."""


FIRST_OF_NUMBER = list("-+0123456789.")
"""Characters with which a number may begin. PyYAML tries a pattern on text that begins with one of them."""

for _kind in (Loader, Dumper):
    _kind.add_implicit_resolver(INT_TAG, re.compile(f"(?:{INT})$"), FIRST_OF_NUMBER)
    _kind.add_implicit_resolver(FLOAT_TAG, re.compile(f"(?:{FLOAT}|{NOT_FINITE})$"), FIRST_OF_NUMBER)

# 010, 008 and 0o17 are text here, and numbers to other readers, so they are written in quotes.
Dumper.add_implicit_resolver(INT_TAG, re.compile("(?:[-+]?[0-9][0-9_]*|0o[0-7]+)$"), list("-+0123456789"))


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


def _check_aliases(document: yaml.Node) -> None:
    """Raise ConstructorError for an alias within its own value, and for aliases of aliases that fill the memory."""
    sizes: dict[yaml.Node, int] = {}
    """Node -> number of values that it has with its aliases expanded."""

    def count_values(node: yaml.Node, nodes_around: tuple[yaml.Node, ...]) -> int:
        """Return the number of values in a node, with its aliases expanded. `nodes_around` are those it stands in."""
        if node in nodes_around:
            raise ConstructorError(None, None, "an alias within its own value", node.start_mark)
        if node not in sizes:
            children = _children_of(node)
            sizes[node] = 1 + sum(count_values(child, (*nodes_around, node)) for child in children)
        return sizes[node]

    num_expanded = count_values(document, ())
    num_written = len(sizes)
    if num_expanded > MAX_EXPANSION * num_written:
        problem = f"aliases make more than {MAX_EXPANSION} values of each that is written"
        raise ConstructorError(None, None, problem, document.start_mark)


def _children_of(node: yaml.Node) -> list[yaml.Node]:
    """Return the items of a list, the keys and values of a mapping, and nothing for a scalar."""
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, yaml.CollectionNode) else []


def dump_yaml(values: Any) -> str:
    """Write values as YAML text, keys in their order. Text that a reader could take for something else gets quotes."""
    return yaml.dump(values, Dumper=Dumper, sort_keys=False)


def dump_record(config: Any, *, keep_variables: bool = True) -> str:
    """Write a configuration, as `schema.as_dict` gives it, as YAML that a launch reads as the same configuration.

    With `keep_variables` the launch resolves `${oc.env:…}` again. Every other `${` is escaped, because it is text.
    """

    def escape(match: re.Match) -> str:
        backslashes = match[1] * 2  # each is escaped
        is_variable = match.string.startswith("oc.", match.end())
        return backslashes + ("${" if is_variable and keep_variables else "\\${")

    return dump_yaml(map_texts(config, lambda text: BEFORE_REFERENCE.sub(escape, str(text))))


def read_record(text: str | bytes) -> Any:
    """Read a recorded configuration as data: no `${…}` is resolved. Raises YAMLError."""

    def unescape(match: re.Match) -> str:
        num_backslashes = len(match[1]) // 2
        return match[1][:num_backslashes] + "${"

    return map_texts(read_yaml(text, PlainLoader), lambda one: BEFORE_REFERENCE.sub(unescape, one))


def block_in(config: Any, key: str) -> dict[str, Any]:
    """Return a block of a recorded configuration, which may be anybody's; {} for none, and for what is no block."""
    value = config.get(key) if isinstance(config, dict) else None
    return value if isinstance(value, dict) else {}
