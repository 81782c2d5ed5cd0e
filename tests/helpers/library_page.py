"""docs/library.md, made from the docstrings of the public names: `python -m tests.helpers.library_page`."""

import inspect
import re
from typing import Any

import llmfoundry_lite as lf
from llmfoundry_lite import programs
from llmfoundry_lite.evaluation.loaded import LoadedModel
from tests.helpers.launch import ROOT

PAGE = ROOT / "docs/library.md"
TOP = """# The library

Use the library to train, load, evaluate and compare models from Python. `import llmfoundry_lite as lf` takes almost no
time, because each name imports what it needs when it is first used. `runs`, `read_run` and `compare` do not import
torch. The package has type annotations (`py.typed`).

This page is generated from the docstrings, and its examples are tests. They run with a folder `data/mine` that
`data prepare` made, a run `runs/tiny` of six batches, two results, and `words.yaml`, which names one task.
"""
ORDER: dict[str, Any] = {
    "train": programs.train,
    "evaluate": lf.evaluate,
    "load": lf.load,
    "call": LoadedModel.__call__,
    "logprobs": LoadedModel.logprobs,
    "generate": LoadedModel.generate,
    "runs": lf.runs,
    "read_run": lf.read_run,
    "batches": lf.batches,
    "compare": lf.compare,
    "open_dataset": lf.open_dataset,
    "UserError": lf.UserError,
}
CALLED = {"call": "lf.load(…)", "logprobs": "lf.load(…).logprobs", "generate": "lf.load(…).generate"}


def build() -> str:
    return TOP + "".join(f"\n## {name}\n\n{_body(name, thing)}\n" for name, thing in ORDER.items())


def _body(name: str, thing: Any) -> str:
    """The signature and the docstring, with examples in fences."""
    paragraphs = [] if isinstance(thing, type) else [f"`{CALLED.get(name, f'lf.{name}')}{_signature(thing)}`"]
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        is_example = paragraph.startswith(">>> ")
        paragraphs.append(f"```python\n{paragraph}\n```" if is_example else paragraph)
    return re.sub(r"\n```\n\n```python\n", "\n", "\n\n".join(paragraphs))


def _signature(function: Any) -> str:
    """Names and defaults, without types."""
    found = inspect.signature(function)
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    shown = [one for one in parameters if one.name != "self"]
    return str(found.replace(parameters=shown, return_annotation=inspect.Signature.empty))


if __name__ == "__main__":
    PAGE.write_text(build())
