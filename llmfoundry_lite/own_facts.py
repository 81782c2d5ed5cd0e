"""Facts that code of the user's own tells without being run: class attributes that are literals, read from its source.

A dry run, a plan and an estimate import no code, but they may read it. `find_module` finds a module's file without
importing the packages around it, and `read_class_facts` reads attributes such as `slots = 3`.
"""

import ast
import functools
import importlib.util
import os
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry_lite.bounded import read_at_most
from llmfoundry_lite.own_code import PREFIX

MAX_SOURCE_BYTES = 1 << 20
"""Maximum size of a source file that is read for facts."""


class FoundModule(NamedTuple):
    """Result of `find_module`."""

    spec: ModuleSpec | None
    """Where the module's code is; None if there is no such module, or if it was made by hand in this process."""
    missing: str
    """The shortest beginning of its dotted name that names no module; empty if the module exists."""


class ClassFacts(NamedTuple):
    """Facts that a class tells of itself."""

    values: dict[str, Any]
    """Attribute -> its value, for those that the class has."""
    problem: str
    """Why an attribute cannot be read, such as `its source is not Python`; empty if nothing is wrong."""


def find_module(module: str) -> FoundModule:
    """Find a module by its dotted name, as files, without importing anything.

    For `package.inner.module`, `missing` is `package` if there is no such package, or `package.inner` if the package
    has no such module. The working directory is searched too, because it is where users keep modules of their own.
    """
    module_name, *inner_names = module.split(".")
    try:
        spec = importlib.util.find_spec(module_name) or PathFinder.find_spec(module_name, [os.getcwd()])
    except ValueError:  # a module that was put into sys.modules by hand
        return FoundModule(None, "")

    # Look for each further part of the name in the folders of the package before it. `importlib.util.find_spec` would
    # find the whole name at once, but imports the packages on the way.
    for inner_name in inner_names:
        if spec is None:
            break
        package_folders = list(spec.submodule_search_locations or ())
        spec = PathFinder.find_spec(inner_name, package_folders)
        module_name += f".{inner_name}"
    return FoundModule(spec, module_name if spec is None else "")


@functools.cache  # an estimate is made thousands of times in a plan
def read_class_facts(name: str, attributes: tuple[str, ...]) -> ClassFacts:
    """Read class attributes that are literals from the source of a class of the user's own. Nothing of it is run.

    `name` has the form `python:package.module:Thing`. Only assignments in the body of the class itself count, such as
    `slots = 3` or `slots: int = 3`. Those that the class inherits, and values that are computed, are not known.
    """
    module_name, _, class_name = name.removeprefix(PREFIX).partition(":")
    spec = find_module(module_name).spec
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ClassFacts({}, f"there is no source of {module_name}")
    try:
        source = read_at_most(Path(spec.origin), MAX_SOURCE_BYTES, "a source file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the user's code, such as an unknown escape in a string
            statements = ast.parse(source).body
    except OSError as error:
        return ClassFacts({}, f"{spec.origin} cannot be read: {error.strerror}")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two for a thousand nested brackets
        return ClassFacts({}, f"{spec.origin} is not Python that can be read")

    classes = [statement for statement in statements if isinstance(statement, ast.ClassDef)]
    with_name = [statement for statement in classes if statement.name == class_name]
    if not with_name:
        return ClassFacts({}, f"{spec.origin} has no class {class_name} at the top level of the file")

    values: dict[str, Any] = {}
    for statement in with_name[-1].body:
        assigned = _assigned_names(statement)
        for attribute in attributes:
            if attribute not in _bound_names(statement):
                continue
            # Another statement that binds the name, such as `slots += 1` or one under `if`, would have to be run.
            problem = f"its {attribute} is computed, and only literals can be read"
            if attribute not in assigned:
                return ClassFacts({}, problem)
            try:
                values[attribute] = ast.literal_eval(statement.value)  # type: ignore
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                return ClassFacts({}, problem)
    return ClassFacts(values, "")


def _assigned_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement assigns its whole value to: `a` and `b` of `a = b = 1`, `a` of `a: int = 1`."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _bound_names(statement: ast.stmt) -> set[str]:
    """Return all names that a statement in the body of a class may bind or delete there, in whatever way.

    The bodies of functions and classes in it are not searched, because they have names of their own.
    """
    names: set[str] = set()
    nodes: list[ast.AST] = [statement]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest is not None:
            names.add(node.rest)
        # An annotation without a value binds nothing.
        if not (isinstance(node, ast.AnnAssign) and node.value is None):
            nodes += ast.iter_child_nodes(node)
    return names
