"""Read YAML text without losing how a scalar was written, and write YAML text that reads as the same values again.

The dialect is YAML 1.1, as LLM Foundry reads it, with two changes. `1e-3` is a number, as in OmegaConf. 010 and 1:30
are text, because few people expect the 8 and the 90 that YAML 1.1 reads there. Keys are always text.

`read_yaml` and `dump_yaml` are for files of a user. `read_yaml` returns numbers and truth values as `PlainScalar`, from
which `scalars.py` chooses the text or the value. `read_record` and `dump_record` are for the configuration that a run
records in its folder.
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
"""Regular expressions of numbers: YAML 1.1's, without octal numbers (010) and numbers to base 60 (1:30), and with
exponents that have no point before them (1e-3), as in OmegaConf."""

STRING_TAG = "tag:yaml.org,2002:str"
MERGE_TAG = "tag:yaml.org,2002:merge"
INT_TAG = "tag:yaml.org,2002:int"
FLOAT_TAG = "tag:yaml.org,2002:float"

BEFORE_REFERENCE = re.compile(r"(?<!\\)(\\*)\$\{")
"""`${` and the backslashes before it. Without the look-behind, matching a megabyte of backslashes takes hours."""
MAX_EXPANSION = 100
"""Maximum ratio of a document's values with its aliases expanded to the values that are written in it."""
MAX_DEPTH = 100
"""Maximum depth of nested blocks. libyaml's reader recurses, and overflows the stack at a depth of some thousands."""

_FastestLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class PlainLoader(_FastestLoader):
    """Loader of ordinary values (numbers, text, lists, dictionaries), which refuses nesting below MAX_DEPTH."""

    depth = 0

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:
        """Count a level of nesting. PyYAML calls this before it reads a node, and `ascend_resolver` after that."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise YAMLError("nested too deeply")

    def ascend_resolver(self) -> None:
        self.depth -= 1


class Loader(PlainLoader):
    """Loader that keeps the text of numbers and truth values: for `0x10`, the text "0x10" with the value 16.

    Keys are text, and a key that is written twice is an error. Dates are text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a dictionary whose keys are text. Raises ConstructorError for a key that is written twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                continue
            if key.value in seen:
                raise ConstructorError(None, None, f"found duplicate key {key.value}", key.start_mark)
            seen.add(key.value)

        # Insert the keys of merged mappings (`<<: *defaults`). The block's own keys take precedence over them, so they
        # do not count as written twice.
        self.flatten_mapping(node)

        # A key such as 1 or `on` stays text, although the value 1 would be a number.
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = STRING_TAG
        return super().construct_mapping(node, deep)


def _construct_plain(loader: Loader, node: yaml.ScalarNode) -> Any:
    """Construct a number or a truth value: `1e-3` becomes PlainScalar("1e-3", 0.001).

    PyYAML calls this for scalars with the tag bool, int or float. A number that Python cannot hold, such as 5e12345,
    and text whose tag says that it is a number (`!!int x`) become text.
    """
    type_name = node.tag.rpartition(":")[2]
    construct = getattr(SafeConstructor, f"construct_yaml_{type_name}")
    try:
        value = construct(loader, node)
    except (ValueError, KeyError):  # too many digits for Python's int, or `!!int x`
        return node.value

    has_overflowed = type_name == "float" and math.isinf(value) and "inf" not in node.value.lower()
    if has_overflowed:
        return node.value
    # In quotes, only an explicit tag makes a number: `!!int "5"`. Then the number is meant and not the text.
    is_plain = not node.style
    return PlainScalar(node.value, value) if is_plain else value


def _tags(*type_names: str) -> list[str]:
    """Return PyYAML's tags of types: `int` has the tag `tag:yaml.org,2002:int`."""
    return [f"tag:yaml.org,2002:{type_name}" for type_name in type_names]


# `Loader` constructs text, null, lists and mappings as PyYAML does, and numbers and truth values with their text. It
# refuses any other tag.
Loader.yaml_constructors = {
    **{tag: Loader.yaml_constructors[tag] for tag in (None, *_tags("str", "null", "seq", "map"))},
    **dict.fromkeys(_tags("bool", "int", "float"), _construct_plain),
}
# Without quotes, it recognises null, truth values and merge keys as YAML 1.1 does. Resolvers for our own patterns of
# numbers are added below. There is none for dates, so they stay text.
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _tags("null", "bool", "merge")]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}


class Dumper(yaml.SafeDumper):
    """Dumper that quotes text which `Loader`, or another reader of YAML 1.1 or 1.2, would not read as text."""


FIRST_OF_NUMBER = list("-+0123456789.")
"""Characters with which a number may begin. PyYAML tries a pattern only on text that begins with one of them."""

for _loader_or_dumper in (Loader, Dumper):
    _loader_or_dumper.add_implicit_resolver(INT_TAG, re.compile(f"(?:{INT})$"), FIRST_OF_NUMBER)
    _loader_or_dumper.add_implicit_resolver(FLOAT_TAG, re.compile(f"(?:{FLOAT}|{NOT_FINITE})$"), FIRST_OF_NUMBER)

# 010, 008 and 0o17 are text for `Loader`, but numbers for other readers of YAML, so they are written in quotes.
Dumper.add_implicit_resolver(INT_TAG, re.compile("(?:[-+]?[0-9][0-9_]*|0o[0-7]+)$"), list("-+0123456789"))


def read_yaml(text: str | bytes, loader_class: Any = Loader) -> Any:
    """Read a YAML of one document into dictionaries, lists and scalars. Returns None for an empty document.

    Numbers and truth values without quotes are PlainScalar, unless `loader_class` is PlainLoader:

    >>> values = read_yaml("revision: 5e3")
    >>> values["revision"], values["revision"].value
    ('5e3', 5000.0)

    Raises YAMLError, also for nesting and aliases with which a small file would fill the memory.
    """
    loader = loader_class(text)
    try:
        document = loader.get_single_node()
        if document is None:
            return None
        _check_aliases(document)
        return loader.construct_document(document)
    finally:
        loader.dispose()


def _check_aliases(document: yaml.Node) -> None:
    """Raise ConstructorError for aliases that would fill the memory, or that stand within their own value.

    With aliases of aliases, a document of a few lines can stand for billions of values:

        a: &a [x, x, x]
        b: &b [*a, *a, *a]
        c: [*b, *b, *b]

    Aliases are shared nodes here, so the values can be counted without expanding them.
    """
    num_values_of: dict[yaml.Node, int] = {}
    """Node -> number of values in it, with its aliases expanded."""

    def count_values(node: yaml.Node, outer_nodes: tuple[yaml.Node, ...]) -> int:
        """Return the number of values in a node, with its aliases expanded. `outer_nodes` are the nodes around it."""
        if node in outer_nodes:
            raise ConstructorError(None, None, "an alias within its own value", node.start_mark)
        if node not in num_values_of:
            children = _children_of(node)
            num_values_of[node] = 1 + sum(count_values(child, (*outer_nodes, node)) for child in children)
        return num_values_of[node]

    num_expanded = count_values(document, ())
    num_written = len(num_values_of)
    if num_expanded > MAX_EXPANSION * num_written:
        problem = f"aliases make more than {MAX_EXPANSION} values of each that is written"
        raise ConstructorError(None, None, problem, document.start_mark)


def _children_of(node: yaml.Node) -> list[yaml.Node]:
    """Return the items of a list, or the keys and values of a mapping. A scalar has none."""
    if isinstance(node, yaml.MappingNode):
        return [child for key_and_value in node.value for child in key_and_value]
    return node.value if isinstance(node, yaml.CollectionNode) else []


def dump_yaml(values: Any) -> str:
    """Return values as YAML text, with the keys in their order.

    Text that a reader of YAML could take for something else is quoted: `{"revision": "5e3"}` gives `revision: '5e3'`.
    """
    return yaml.dump(values, Dumper=Dumper, sort_keys=False)


def dump_record(config: Any, *, keep_variables: bool = True) -> str:
    """Return a resolved configuration as YAML text that a launch reads as the same configuration.

    `config` is as `schema.as_dict` returns it: references to other keys are resolved, and text of environment variables
    is `${oc.env:NAME}`. With `keep_variables`, a launch that reads the record resolves these again. Every other `${` is
    part of a text, so it is written as `\\${`.
    """

    def escape(match: re.Match) -> str:
        """Return the text for a `${` and the backslashes before it, each of which must be escaped itself."""
        escaped_backslashes = match[1] * 2
        is_variable = match.string.startswith("oc.", match.end())
        if is_variable and keep_variables:
            return escaped_backslashes + "${"
        return escaped_backslashes + "\\${"

    return dump_yaml(map_texts(config, lambda text: BEFORE_REFERENCE.sub(escape, str(text))))


def read_record(text: str | bytes) -> Any:
    """Read the text of `dump_record`. The record may be anybody's, so nothing in it is resolved: `${…}` stays text.

    Numbers and truth values are Python's. Raises YAMLError.
    """

    def unescape(match: re.Match) -> str:
        """Undo `escape` in `dump_record`: of two backslashes, one stays, and the one that escapes `${` is removed."""
        num_backslashes = len(match[1]) // 2
        return match[1][:num_backslashes] + "${"

    return map_texts(read_yaml(text, PlainLoader), lambda scalar: BEFORE_REFERENCE.sub(unescape, scalar))


def block_in(config: Any, key: str) -> dict[str, Any]:
    """Return the block at the top-level `key` of a recorded configuration, which may be malformed.

    Returns {} if the key is missing, or if its value or the whole configuration is not a dictionary.
    """
    value = config.get(key) if isinstance(config, dict) else None
    return value if isinstance(value, dict) else {}
