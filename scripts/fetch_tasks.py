"""Download of public evaluation tasks from the Hugging Face Hub: a JSONL file for each, with LLM Foundry's columns.

    python scripts/fetch_tasks.py arc_easy piqa --out data/eval

`evals/<task>.yaml` says how the questions are asked. The data sets have licences of their own, so none of their text is
in this repository. `ORIGINS`, at the end, has each task's repository and the function that converts its rows.
"""

if __name__ == "__main__":  # first, because an empty entry of PYTHONPATH stands for the working directory
    from llmfoundry_lite.search_path import leave_out_working_directory

    leave_out_working_directory()

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from llmfoundry_lite.cli.main import run_program
from llmfoundry_lite.errors import DataError, list_names
from llmfoundry_lite.files import write_atomically

Row = dict[str, Any]
LOWERED_WORDS = ("A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their")
"""First words of a name that are written in lower case within a sentence."""
POSSESSIVE_PRONOUNS = ("my", "his", "her", "our", "their")

program = typer.Typer(add_completion=False, rich_markup_mode=None)


@program.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAMES]", help="Such as arc_easy [all].")] = None,
    out: Annotated[Path, typer.Option(help="The folder for <name>.jsonl.")] = Path("data/eval"),
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there.")] = False,
) -> None:
    """Download the public evaluation tasks' data from the Hub."""
    fetch_tasks(names or (), out, force=force, notify=typer.echo)


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a task's rows. Every repository named here holds Parquet, which needs none of its owner's code."""

    repository: str
    configuration: str | None
    split: str
    num_rows: int
    """Number of rows in the split of published results."""
    convert: Callable[[Row], Row]
    """Returns a row of the repository as a question, with the columns of the task's kind in LLM Foundry."""


def fetch_tasks(names: Iterable[str], out: Path, *, force: bool, notify: Callable[[str], None]) -> None:
    """Write `<out>/<name>.jsonl` for each name, or for all tasks. Keeps existing files, unless `force`.

    Raises DataError for an unknown name, and when the Hub does not deliver.
    """
    names = list(dict.fromkeys(names)) or list(ORIGINS)
    for name in names:
        if name not in ORIGINS:
            raise DataError(f"{name} is no task that can be fetched; expected {', '.join(ORIGINS)}")
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        origin = ORIGINS[name]
        path = out / f"{name}.jsonl"
        if path.exists() and not force:
            notify(f"{name}: {path} is there already")
            continue

        questions = convert_rows(name, _download(name, origin))
        lines = [json.dumps(question, ensure_ascii=False) + "\n" for question in questions]
        write_atomically(path, "".join(lines).encode())
        notify(f"{name}: {len(lines)} rows in {path}")
        if len(lines) != origin.num_rows:
            notify(f"{name}: published results are about {origin.num_rows} rows; these are not comparable with them")


def convert_rows(name: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of a task's repository as questions. Raises DataError for a row without the expected columns."""
    for number, row in enumerate(rows):
        try:
            yield ORIGINS[name].convert(row)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DataError(
                f"{name}: row {number} of {ORIGINS[name].repository} is not of the expected shape "
                f"({type(error).__name__}: {error}); its columns are {list_names(row)}"
            ) from error


def _download(name: str, origin: Origin) -> Any:
    """Return the rows of a task's split. Raises DataError if the Hub does not deliver them."""
    import datasets

    try:
        return datasets.load_dataset(origin.repository, origin.configuration, split=origin.split)
    except Exception as error:  # `datasets` and the network raise a dozen unrelated types
        raise DataError(
            f"{name}: {origin.repository} cannot be had from the Hugging Face Hub ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); tasks fetched so far are kept"
        ) from error


# ------------------------------------------------------------------------- a repository's row -> a question


def _arc(row: Row) -> Row:
    """Convert a row of ARC. The question is announced as one, as LLM Foundry does."""
    return {"query": f"Question: {row['question']}", **_lettered(row)}


def _openbook_qa(row: Row) -> Row:
    return {"query": row["question_stem"], **_lettered(row)}


def _lettered(row: Row) -> Row:
    """Return the columns `choices` and `gold`, the index of the right one, of a row whose answers have letters."""
    choices = row["choices"]
    return {"choices": list(choices["text"]), "gold": list(choices["label"]).index(row["answerKey"])}


def _boolq(row: Row) -> Row:
    query = f"Passage: {row['passage']}\nQuestion: {row['question']}?"
    return {"query": query, "choices": ["no", "yes"], "gold": int(row["answer"]), "passage": row["passage"]}


def _hellaswag(row: Row) -> Row:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    choices = [_without_marks(ending) for ending in row["endings"]]
    return {"query": _without_marks(context), "choices": choices, "gold": int(row["label"])}


def _without_marks(text: str) -> str:
    """Remove WikiHow's [title], [step] and [substeps], as lm-evaluation-harness does."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _piqa(row: Row) -> Row:
    gold = int(row["label"])
    if gold < 0:
        raise ValueError("no label")
    return {
        "query": f"Question: {row['goal']}\n",
        "choices": [row["sol1"], row["sol2"]],
        "gold": gold,
    }


def _winograd(row: Row) -> Row:
    """Replace the pronoun by each name. The text after it is scored (Trinh and Le's partial evaluation, 1806.02847).

    "The cup did not fit into the bag because it was too large." becomes the contexts "… because the cup" and "…
    because the bag", with the continuation "was too large." Raises ValueError if the pronoun is not where the row says.
    """
    text = row["text"]
    pronoun = row["pronoun"]
    start = row["pronoun_loc"]
    end = start + len(pronoun)
    if text[start:end] != pronoun:
        raise ValueError(f"no {pronoun!r} at {start}")

    before = re.sub(" {2,}", " ", text[:start])
    after = re.sub(" {2,}", " ", text[end:])
    starts_sentence = before.rstrip()[-1:] in ("", ".")
    return {
        "context_options": [
            before + _name_in_place(name, pronoun, starts_sentence=starts_sentence) for name in row["options"]
        ],
        "continuation": after.strip(),
        "gold": int(row["label"]),
    }


def _name_in_place(name: str, pronoun: str, *, starts_sentence: bool) -> str:
    """Return a name as it must be written in the place of a pronoun.

    Its first word is in lower case within a sentence, unless it is a proper name: `The cup` becomes `the cup`. In the
    place of a possessive pronoun, such as `his`, `'s` follows.
    """
    first_word, _, other_words = name.partition(" ")
    if not starts_sentence and first_word in LOWERED_WORDS:
        name = f"{first_word.lower()} {other_words}".strip()
    if pronoun.lower() in POSSESSIVE_PRONOUNS:
        name += "'s"
    return name


def _winogrande(row: Row) -> Row:
    before, _, after = row["sentence"].partition("_")
    options = [row["option1"], row["option2"]]
    return {
        "context_options": [before + option for option in options],
        "continuation": after.strip(),
        "gold": ("1", "2").index(row["answer"]),
    }


def _lambada(row: Row) -> Row:
    context, word = row["text"].rsplit(" ", 1)
    return {"context": context, "continuation": word}


def _copa(row: Row) -> Row:
    """Join a premise and its cause or effect into one sentence: "The glass fell, therefore" and "it broke."."""
    link = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = [choice[0].lower() + choice[1:] for choice in (row["choice1"], row["choice2"])]
    return {"query": f"{row['premise'].strip()[:-1]}, {link}", "choices": choices, "gold": int(row["label"])}


ORIGINS = {
    "arc_challenge": Origin("allenai/ai2_arc", "ARC-Challenge", "test", 1172, _arc),
    "arc_easy": Origin("allenai/ai2_arc", "ARC-Easy", "test", 2376, _arc),
    "boolq": Origin("google/boolq", None, "validation", 3270, _boolq),
    "hellaswag": Origin("Rowan/hellaswag", None, "validation", 10042, _hellaswag),
    "piqa": Origin("baber/piqa", None, "validation", 1838, _piqa),
    "winograd": Origin("lighteval/winograd_wsc", "wsc273", "test", 273, _winograd),
    "winogrande": Origin("allenai/winogrande", "winogrande_xl", "validation", 1267, _winogrande),
    "lambada_openai": Origin("EleutherAI/lambada_openai", "default", "test", 5153, _lambada),
    "copa": Origin("aps/super_glue", "copa", "validation", 100, _copa),
    "openbook_qa": Origin("allenai/openbookqa", "main", "test", 500, _openbook_qa),
}


if __name__ == "__main__":
    run_program(program, "fetch_tasks.py")
