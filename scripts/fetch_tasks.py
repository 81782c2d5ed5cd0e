"""Download of public evaluation tasks: a JSONL file for each, with LLM Foundry's columns.

    python scripts/fetch_tasks.py arc_easy piqa --out data/eval
    python scripts/fetch_tasks.py --suite core
    python scripts/fetch_tasks.py --suite mmlu

Most tasks come from the Hugging Face Hub: `ORIGINS`, at the end, has each task's repository and the function that
converts its rows. The tasks of DCLM's CORE come from LLM Foundry's repository, which publishes them in this format;
`CORE_FILES` has each file with the hash of its content.

`evals/<task>.yaml` and, for suites, `yamls/eval/<suite>.yaml` say how the questions are asked. The data sets have
licences of their own (docs/suites.md), so none of their text is in this repository.
"""

if __name__ == "__main__":  # first, because an empty entry of PYTHONPATH stands for the working directory
    from llmfoundry_lite.search_path import leave_out_working_directory

    leave_out_working_directory()

import hashlib
import json
import re
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from llmfoundry_lite.bounded import MAX_LINE_BYTES, read_at_most, read_file_at_most
from llmfoundry_lite.cli.main import run_program
from llmfoundry_lite.errors import DataError, list_names
from llmfoundry_lite.files import write_atomically

Row = dict[str, Any]
LOWERED_WORDS = ("A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their")
"""First words of a name that are written in lower case within a sentence."""
POSSESSIVE_PRONOUNS = ("my", "his", "her", "our", "their")

CORE_SOURCE = (
    "https://raw.githubusercontent.com/mosaicml/llm-foundry/8c8dd48f72168c5d51e2f7b151595892a8fba43d"
    "/scripts/eval/local_data"
)
"""LLM Foundry's files of questions, of its last commit in July 2025. DCLM's script `eval/download_eval_data.sh` copies
the same folder."""
SECONDS_WITHOUT_ANSWER = 60
"""A download that receives nothing for this long is given up."""

program = typer.Typer(add_completion=False, rich_markup_mode=None)


@program.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAMES]", help="Such as arc_easy [all that are in no suite].")
    ] = None,
    suite: Annotated[str | None, typer.Option(help="The tasks of a suite: core or mmlu.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for <name>.jsonl.")] = Path("data/eval"),
    core_source: Annotated[
        str, typer.Option(help="Folder or URL of LLM Foundry's files, such as llm-foundry/scripts/eval/local_data.")
    ] = CORE_SOURCE,
    force: Annotated[bool, typer.Option("--force", help="Fetch again what is there.")] = False,
) -> None:
    """Download the public evaluation tasks' data: from the Hub, and that of the suite core from LLM Foundry."""
    names = [*(names or ()), *_names_of_suite(suite)]
    fetch_tasks(names, out, force=force, notify=typer.echo, core_source=core_source)


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a task's rows. Every repository named here holds Parquet, which needs none of its owner's code."""

    repository: str
    configuration: str | None
    split: str
    num_rows: int
    """Number of rows in the split of published results, and in the split of examples if there is one."""
    convert: Callable[[Row], Row]
    """Returns a row of the repository as a question, with the columns of the task's kind in LLM Foundry."""
    examples_split: str | None = None
    """A split whose rows are only shown as examples. They come first in the file, and each row then has the name of its
    split in the column `split`."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A file of questions in LLM Foundry's repository, which is used as it is."""

    path: str
    """The file's path below `scripts/eval/local_data`."""
    blob_id: str
    """Git's hash of the content, as `git ls-tree` shows it for the commit of CORE_SOURCE."""
    num_rows: int
    """Number of questions in DCLM's `eval/eval_meta_data.csv`, except for arc_challenge, where that table has 2,376,
    and the file the 1,172 of ARC's test split."""


def fetch_tasks(
    names: Iterable[str],
    out: Path,
    *,
    force: bool,
    notify: Callable[[str], None],
    core_source: str = CORE_SOURCE,
) -> None:
    """Write `<out>/<name>.jsonl` for each name, or for the tasks in no suite. Keeps existing files, unless `force`.

    A name is a key of ORIGINS or of CORE_FILES. The files of the latter are read from `core_source`, a folder or a URL.
    Raises DataError for an unknown name, if a server does not deliver, and if a file of CORE is not the published one.
    """
    names = list(dict.fromkeys(names)) or [name for name in ORIGINS if name not in SUITES["mmlu"]]
    for name in names:
        if name not in ORIGINS and name not in CORE_FILES:
            expected = f"{', '.join(ORIGINS)}, or --suite core"
            raise DataError(f"{name} is no task that can be fetched; expected {expected}")
    for number, name in enumerate(names, start=1):
        path = out / f"{name}.jsonl"
        if path.exists() and not force:
            notify(f"{name}: {path} is there already")
            continue

        content = _fetch_content(name, core_source)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)

        num_rows = sum(bool(line.strip()) for line in content.splitlines())
        progress = f" ({number} of {len(names)})" if len(names) > 1 else ""
        notify(f"{name}: {num_rows} rows, {len(content) / 1e6:.2f} MB in {path}{progress}")
        expected_rows = CORE_FILES[name].num_rows if name in CORE_FILES else ORIGINS[name].num_rows
        if num_rows != expected_rows:
            notify(f"{name}: published results are about {expected_rows} rows; these are not comparable with them")


def _fetch_content(name: str, core_source: str) -> bytes:
    """Return the content of a task's file: the published file, or the converted rows of the Hub."""
    if name in CORE_FILES:
        return read_published_file(name, core_source)

    origin = ORIGINS[name]
    questions: list[Row] = []
    if origin.examples_split is None:
        questions += convert_rows(name, _download(name, origin, origin.split))
    else:
        for split in (origin.examples_split, origin.split):
            for row in convert_rows(name, _download(name, origin, split)):
                questions.append({**row, "split": split})
    return "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions).encode()


def _names_of_suite(suite: str | None) -> list[str]:
    """Return the names of a suite's tasks; none without a suite. Raises DataError for a suite that is not known."""
    if suite is None:
        return []
    if suite not in SUITES:
        raise DataError(f"--suite {suite}: no such suite; expected {', '.join(SUITES)}")
    return SUITES[suite]


def read_published_file(name: str, source: str) -> bytes:
    """Return the content of a file of CORE, after a check that it is the published one.

    `source` is a folder or a URL. Raises DataError if the file cannot be read, or if its content is another one.
    """
    file = CORE_FILES[name]
    place = f"{source.rstrip('/')}/{file.path}"
    try:
        if source.startswith(("https://", "http://")):
            with urllib.request.urlopen(place, timeout=SECONDS_WITHOUT_ANSWER) as answer:
                content = read_file_at_most(answer, MAX_LINE_BYTES, place, "a task")
        else:
            content = read_at_most(place, MAX_LINE_BYTES, "a task")
    except (OSError, HTTPException) as error:
        # urllib hides the error of the network, which tells whether another attempt may succeed, in an attribute.
        reason = getattr(error, "reason", None)
        cause = reason if isinstance(reason, OSError) else error
        remedy = "--core-source also takes the folder of a clone; tasks fetched so far are kept"
        raise DataError(f"{name}: {place} cannot be read ({error}); {remedy}") from cause

    # Git's hash of a file covers its kind and size, then its content.
    blob_id = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if blob_id != file.blob_id:
        raise DataError(
            f"{name}: {place} is not the published file: its git hash is {blob_id}, expected {file.blob_id}; "
            "give --core-source a clone of mosaicml/llm-foundry, or fetch it again"
        )
    return content


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


def _download(name: str, origin: Origin, split: str) -> Any:
    """Return the rows of a split of a task's repository. Raises DataError if the Hub does not deliver them."""
    import datasets

    try:
        return datasets.load_dataset(origin.repository, origin.configuration, split=split)
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


def _mmlu(row: Row) -> Row:
    """Convert a row of MMLU. The category is the subject as a text has it: "abstract algebra"."""
    return {
        "query": row["question"],
        "choices": list(row["choices"]),
        "gold": int(row["answer"]),
        "category": row["subject"].replace("_", " "),
    }


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
    # 14,042 questions, and five examples for each of 57 subjects.
    "mmlu": Origin("cais/mmlu", "all", "test", 14042 + 5 * 57, _mmlu, examples_split="dev"),
}


CORE_FILES = {
    "core/hellaswag": PublishedFile(
        "language_understanding/hellaswag.jsonl", "448321079fdc140bd8566b16b24eda9ceacd3501", 10042
    ),
    "core/jeopardy": PublishedFile(
        "world_knowledge/jeopardy_all.jsonl", "2f771918dbc8b68550df204171b14d2648b5d494", 2117
    ),
    "core/bigbench_qa_wikidata": PublishedFile(
        "world_knowledge/bigbench_qa_wikidata.jsonl", "5e1be72797ba082fd4f6efa42f7d759d2d23339a", 20321
    ),
    "core/arc_easy": PublishedFile("world_knowledge/arc_easy.jsonl", "b5fd1bf87a24246a6be67230b721541688f5c349", 2376),
    "core/arc_challenge": PublishedFile(
        "world_knowledge/arc_challenge.jsonl", "ce66b8dcfb4bac892a404a0dda8b4e8ed0f84b89", 1172
    ),
    "core/copa": PublishedFile("commonsense_reasoning/copa.jsonl", "b22f96e08ae9d0e97e1ae58f67b6425c77ef200a", 100),
    "core/commonsense_qa": PublishedFile(
        "commonsense_reasoning/commonsense_qa.jsonl", "f1cc16a88b05ab0934aab2ec2d02a6869e6e5520", 1221
    ),
    "core/piqa": PublishedFile("commonsense_reasoning/piqa.jsonl", "a9992adfdefde366fe7ccff871f5aa62449a09cf", 1838),
    "core/openbook_qa": PublishedFile(
        "commonsense_reasoning/openbook_qa.jsonl", "a8aff255a64cbc72a85252acf00df25a315686c2", 500
    ),
    "core/lambada_openai": PublishedFile(
        "language_understanding/lambada_openai.jsonl", "4da02dd53b9e7385871d06ab855471d77b2f7dda", 5153
    ),
    "core/winograd": PublishedFile(
        "language_understanding/winograd_wsc.jsonl", "762fe030ac6938ecba438c47a04057247c6ab891", 273
    ),
    "core/winogrande": PublishedFile(
        "language_understanding/winogrande.jsonl", "316e87ae4659f0c402b0f00551fdec83ab0a0986", 1267
    ),
    "core/bigbench_dyck_languages": PublishedFile(
        "symbolic_problem_solving/bigbench_dyck_languages.jsonl", "27a4ac2b3b18716add92f4ecd62475c4f8d77768", 1000
    ),
    "core/agi_eval_lsat_ar": PublishedFile(
        "symbolic_problem_solving/agi_eval_lsat_ar.jsonl", "d663b427ba310d3f877f09a6830198ca7c856189", 230
    ),
    "core/bigbench_cs_algorithms": PublishedFile(
        "symbolic_problem_solving/bigbench_cs_algorithms.jsonl", "7ecee0f270f3de8b6558da14ae02181f3d950a40", 1320
    ),
    "core/bigbench_operators": PublishedFile(
        "symbolic_problem_solving/bigbench_operators.jsonl", "a982dc4f962725c9dc4abb07d3cc333c99959290", 210
    ),
    "core/bigbench_repeat_copy_logic": PublishedFile(
        "symbolic_problem_solving/bigbench_repeat_copy_logic.jsonl", "86621f10e7124ed6f3a61fb91493c1256c008f60", 32
    ),
    "core/squad": PublishedFile("reading_comprehension/squad.jsonl", "dc733b8f58ec666c53fd946198c434b819a00680", 10570),
    "core/coqa": PublishedFile("reading_comprehension/coqa.jsonl", "028bd4e51326cc43f8394987ae47fbb271aeba9d", 7983),
    "core/boolq": PublishedFile("reading_comprehension/boolq.jsonl", "f42083a58713d00ef4600118cfdf79618c269190", 3270),
    "core/bigbench_language_identification": PublishedFile(
        "language_understanding/bigbench_language_identification.jsonl",
        "1f132fbbb12a67ce267b7b92b458175632c265f3",
        10000,
    ),
}

SUITES = {"core": list(CORE_FILES), "mmlu": ["mmlu"]}


if __name__ == "__main__":
    run_program(program, "fetch_tasks.py")
