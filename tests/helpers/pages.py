"""Results with questions, and with hostile texts in every field, for tests of pages that show them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.results import choice, write_result

LONE_SURROGATE = "\ud800"
HOSTILE = (
    "</script><script>document.title='broken'</script><!--<img src=x onerror=alert(1)>' \" & {{ 7*7 }} "
    f"\u2028 \x00 \u202e {LONE_SURROGATE}"
)
"""A text that would end a script, run another one, load a picture, or close an attribute where it is not escaped."""


def question_task(answers: Sequence[int], **changes: Any) -> tuple[Any, Any]:
    """Return a task (record, items) whose items have a question, two choices with the first one right, and scores."""
    record, items = choice(answers)
    for index, (item, answer) in enumerate(zip(items, answers, strict=True)):
        item |= {"question": f"Question {index}?", "choices": [f"yes {index}", f"no {index}"], "gold": 0}
        item |= {"log_probability": [-4.0, -6.0] if answer else [-6.0, -4.0], "num_tokens": [2, 2]}
        item |= {"num_characters": [4, 3], "chosen": {"acc_per_token": 1 - answer, "acc_norm": 1 - answer}}
    return {**record, **changes}, items


def hostile_result(folder: Path, name: str, text: str = HOSTILE) -> Path:
    """Write a result in which every text is hostile: names, facts of the model, questions, choices and prompts."""
    record, items = question_task([1, 0] * 20, code=text)
    for item in items:
        item |= {"question": text, "choices": [text, text], "category": text, "answers": [text], "text": text}
        item["prompt_tokens"] = {"shared": [text], "contexts": [[text], [text]], "answers": [[text], [text]]}
    path = write_result(folder, name, {f"{text}/0-shot": (record, items)})
    facts = {"model": f"{text} {name}", **dict.fromkeys(("suite", "source", "precision", "tokenizer", "save_id"), text)}
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return path
