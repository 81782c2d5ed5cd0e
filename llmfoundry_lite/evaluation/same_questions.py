"""Checks that two models were asked the same, which a comparison needs: `check_same_questions`."""

import numpy as np

from llmfoundry_lite.config.task_types import TEXT
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.means import by_document
from llmfoundry_lite.evaluation.metrics import has_other_tokenizer
from llmfoundry_lite.evaluation.records import Record
from llmfoundry_lite.evaluation.results import Results


def check_same_questions(task: str, first_results: Results, other_results: Results) -> None:
    """Raise DataError unless both models answered the same questions of a task, asked in the same way.

    Records have a fingerprint of the data, and one of the data with all settings. The error explains a difference: it
    lists every setting that differs, and names the first question that does. Held-out text that models with different
    tokenizers read must also have the same number of bytes in each document.
    """
    first_record = first_results.tasks[task]
    other_record = other_results.tasks[task]
    is_text = first_record["type"] == TEXT
    tokenizers_differ = has_other_tokenizer(first_results, other_results)
    first_other_row = _first_different("row", task, first_results, other_results)

    # Compare the settings.
    differences = _different_settings(task, first_results, other_results, has_other_rows=bool(first_other_row))
    limit = first_record["settings"].get("limit")
    limit_differs = limit != other_record["settings"].get("limit")
    if is_text and tokenizers_differ and limit is not None and not limit_differs:
        differences.append(f"their tokenizers differ, so that limit {limit!r}, of windows, ends elsewhere in the text")
        limit_differs = True

    # Compare the data. The fingerprint covers a text only up to its limit, so different limits alone change it.
    has_same_data = first_record["data_fingerprint"] == other_record["data_fingerprint"]
    if not has_same_data and not (is_text and limit_differs):
        differences.append(f"the data ({first_record['n']:,} items against {other_record['n']:,}{first_other_row})")

    # Compare everything else that the fingerprint covers. Windows of a text depend on the tokenizer, so there it says
    # nothing about models with different tokenizers.
    has_same_fingerprint = first_record["fingerprint"] == other_record["fingerprint"]
    if not differences and not has_same_fingerprint and not (is_text and tokenizers_differ):
        fingerprints = f"{first_record['fingerprint']} against {other_record['fingerprint']}"
        differences.append(f"something that no setting shows (fingerprint {fingerprints})")

    if differences:
        remedy = "evaluate both with one task file"
        if limit_differs:
            remedy = "evaluate both without limit"
        elif has_same_data and first_record["settings"].get("max_seq_len") != other_record["settings"].get(
            "max_seq_len"
        ):
            remedy = f"evaluate both with max_seq_len={_common_length(first_record, other_record)}"
        raise DataError(
            f"{task}: {first_results.name} and {other_results.name} were not asked the same: "
            f"{'; '.join(differences)}; {remedy}, or leave the task out: --skip {task}"
        )
    if is_text and tokenizers_differ and has_same_fingerprint:
        _check_same_bytes(task, first_results, other_results)


def _common_length(first_record: Record, other_record: Record) -> int:
    """Return the context length with which both models can be asked the same: the smaller one of two records.

    A record has the length only if it had an effect, so one of them may lack it.
    """
    lengths = [record["settings"].get("max_seq_len") for record in (first_record, other_record)]
    return min(length for length in lengths if length is not None)


def _different_settings(
    task: str, first_results: Results, other_results: Results, *, has_other_rows: bool
) -> list[str]:
    """Describe each setting of a task that differs between two results, such as "num_fewshot 0 against 5".

    has_other_rows: the questions differ. Their prompts then differ as well, and are not listed.

    Returns an empty list if all settings are equal.
    """
    first_record = first_results.tasks[task]
    other_record = other_results.tasks[task]
    differences: list[str] = []

    # Compare facts that the record has outside its settings.
    different_facts: list[str] = []
    for key in ("type", "num_fewshot", "tokenization", "metric"):
        if first_record.get(key) != other_record.get(key):
            different_facts.append(key)
            differences.append(f"{key} {first_record.get(key)!r} against {other_record.get(key)!r}")

    # Compare every setting that either record has.
    first_settings = first_record["settings"]
    other_settings = other_record["settings"]
    for key in {**first_settings, **other_settings}:
        first_setting = first_settings.get(key)
        other_setting = other_settings.get(key)
        if first_setting == other_setting or key in different_facts:
            continue
        if key == "stop_tokens":  # a property of each model's tokenizer, not of the task
            continue

        # Logs of another tool have a hash of all prompts, which a reader cannot use. Name the first that differs.
        are_hashes = str(first_setting).startswith("sha256:") and str(other_setting).startswith("sha256:")
        if key == "prompts" and are_hashes:
            if not has_other_rows:
                differences.append(f"their prompts{_first_different('prompt', task, first_results, other_results)}")
            continue

        counts = f" ({first_record['n']:,} items against {other_record['n']:,})" if key == "limit" else ""
        differences.append(f"{key} {first_setting!r} against {other_setting!r}{counts}")
    return differences


def _check_same_bytes(task: str, first_results: Results, other_results: Results) -> None:
    """Raise DataError unless each document of a held-out text has the same number of bytes for both models.

    A data set of token ids is read as different texts by two tokenizers. Windows depend on the tokenizer, too, but the
    bytes of a document's windows add up to those of the document.
    """
    first_bytes = by_document(first_results.items[task])[:, 1]
    other_bytes = by_document(other_results.items[task])[:, 1]
    if not np.array_equal(first_bytes, other_bytes):
        raise DataError(
            f"{task}: the data are token ids, and {first_results.name} and {other_results.name} have different "
            f"tokenizers; evaluate both on a text file, or leave the task out: --skip {task}"
        )


def _first_different(compared_fact: str, task: str, first_results: Results, other_results: Results) -> str:
    """Name the first item of a task in which two results differ, to complete an error, or return an empty text.

    compared_fact: "row" compares the questions, and "prompt" the prompts.

    Returns for instance "; row 17 is the first with another question". Logs of other evaluation tools record hashes of
    both facts. Items of this library have the texts of their question and its options. Items of older releases lack
    these, and are compared by the right answer, the category, and the lengths or texts of the answers.
    """

    def read_fact(item: Record, *, has_question: bool) -> object:
        """Return what is compared: the hash of the compared fact, or the facts that make the item's question."""
        if compared_fact == "prompt" or "row" in item:
            return item.get(compared_fact)
        texts = ("question", "choices") if has_question else ("num_characters",)
        return [item.get(key) for key in (*texts, "gold", "answers", "category")]

    is_text = first_results.tasks[task]["type"] == TEXT
    other_items = {item["index"]: item for item in other_results.items.get(task, [])}
    for item in first_results.items.get(task, []):
        # An item that only one model was asked, or a window, which depends on the tokenizer, says nothing.
        other_item = other_items.get(item["index"])
        is_comparable = "row" in item or not is_text
        if other_item is None or not is_comparable:
            continue

        has_question = "question" in item and "question" in other_item
        fact = read_fact(item, has_question=has_question)
        other_fact = read_fact(other_item, has_question=has_question)
        if fact != other_fact:
            noun = "question" if compared_fact == "row" else "prompt"
            item_name = item.get("id") or f"row {item['index'] + 1}"
            return f"; {item_name} is the first with another {noun}"
    return ""
