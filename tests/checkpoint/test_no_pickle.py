"""A checkpoint is read on machines that do not know who wrote it: nothing in the package can unpickle."""

import ast

import pytest

from tests.helpers.launch import ROOT

FORBIDDEN = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    *("torch.save", "torch.load", "torch.serialization", "allow_pickle=True"),
    *("torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.FileSystemReader"),
    *("dist.all_gather_object", "dist.broadcast_object_list", "dist.gather_object", "dist.scatter_object_list"),
}


def names_in(source):
    """Every module imported and every dotted name in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"allow_pickle={ast.unparse(node.value)}"


def test_nothing_in_the_package_pickles_or_unpickles():
    package = ROOT / "llmfoundry_lite"
    found = {
        (str(path.relative_to(package)), name)
        for path in package.rglob("*.py")
        for name in names_in(path.read_text())
        if name in FORBIDDEN
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from torch import load", "import torch\ntorch.load('x')", "from pickle import loads"),
        "np.load('x', allow_pickle=True)",
    ],
)
def test_the_search_would_find_it(source):
    assert FORBIDDEN & set(names_in(source))
