"""Prepares tasks: turns the rows of a file into items, each with the token ids whose probability is asked for.

`task_files.py` reads the rows, `prompts.py` renders them, and `encoding.py` tokenises them. `prepare_task` goes through
all rows of a task, and `_build_item` through the steps for one row. `documents.py` is the counterpart of this file for
held-out text.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from llmfoundry_lite.config.eval_schema import TaskConfig
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.evaluation.documents import check_text
from llmfoundry_lite.evaluation.encoding import Encoding, UnusableItemError, limit_answer_tokens, list_stop_tokens
from llmfoundry_lite.evaluation.items import EmptyTaskError, Item, PreparedTask, fingerprint
from llmfoundry_lite.evaluation.own_scores import import_metrics
from llmfoundry_lite.evaluation.prompts import (
    category_of,
    choose_examples,
    clean,
    effective_limit,
    find_clusters,
    find_question_rows,
    fingerprinted_settings,
    group_examples,
    question_fingerprint,
    render_context,
    render_example,
    render_prompt_string,
    render_solution,
    resolve_settings,
)
from llmfoundry_lite.evaluation.questions import answer_of, read_question
from llmfoundry_lite.evaluation.task_files import Row, data_fingerprint, read_rows


def prepare_task(
    config: TaskConfig,
    rows: list[Row],
    num_fewshot: int,
    tokenizer: Tokenizer,
    *,
    max_seq_len: int,
    tokenization: str,
    limit: int | None = None,
) -> PreparedTask:
    """Render every row of a task as a prompt with `num_fewshot` examples, and tokenise it.

    rows: the checked rows of the task's file, as `read_rows` returns them.
    max_seq_len: the model's context length in tokens. Longer prompts lose their first tokens.
    tokenization: "separate" or "joint", if the task does not set its own.
    limit: the largest number of questions; None for all.

    Returns the prepared task. Its fingerprint is a hash of the rows and of all settings that prompts depend on. A
    comparison of two models uses it to check that both were asked the same.

    Raises DataError if there are too few rows for the examples, and EmptyTaskError if no question fits the model.
    """
    # Settings that have an effect on prompts go into the fingerprint. They are collected before the length of answers
    # is filled in, because that length depends on the tokenizer.
    import_metrics(config)
    config = resolve_settings(config, num_fewshot, tokenization)
    num_questions = len(find_question_rows(config, rows, num_fewshot))
    settings = fingerprinted_settings(config, num_fewshot, effective_limit(limit, num_questions))
    if answer_of(config) == "generation":
        stop_tokens = list_stop_tokens(tokenizer)
        if stop_tokens:  # an empty list is not recorded, because it would change the fingerprints of older results
            settings["stop_tokens"] = stop_tokens
    config = _with_answer_length(config, rows, tokenizer)

    skipped_rows: dict[str, list[int]] = {}
    """Reason -> the rows that cannot be asked because of it."""
    clusters = find_clusters(config, rows)
    items: list[Item] = []
    for item in _build_items(config, rows, num_fewshot, tokenizer, max_seq_len, limit, skipped_rows):
        items.append(replace(item, cluster=clusters.get(item.index)))

    is_any_trimmed = any(request.num_trimmed for item in items for request in item.requests)
    if skipped_rows or is_any_trimmed:
        settings["max_seq_len"] = max_seq_len  # recorded only if it had an effect

    # A question that the file repeats is asked again, but the number of repetitions is reported.
    distinct_questions = {question_fingerprint(config, rows[item.index]) for item in items}
    skipped = {f"{reason}, first in row {indices[0] + 1}": len(indices) for reason, indices in skipped_rows.items()}
    return PreparedTask(
        label=config.label,
        kind=config.icl_task_type,
        num_fewshot=num_fewshot,
        items=tuple(items),
        fingerprint=fingerprint([settings, rows]),
        settings=settings,
        data_fingerprint=data_fingerprint(rows),
        beginning=tokenizer.beginning,
        num_repeated=len(items) - len(distinct_questions),
        skipped=skipped,
        config=config,
    )


def check_task(
    config: TaskConfig, tokenizer: Tokenizer, *, tokenization: str, max_seq_len: int, limit: int | None
) -> None:
    """Raise the DataError that preparing this task would raise, in a fraction of the time.

    All rows are read and checked, but only the first usable question is tokenised. A training run calls this before it
    begins. MDS splits cannot be checked this way.
    """
    if config.task_type.answer == "text":
        check_text(config, tokenizer)
        return
    import_metrics(config)
    rows = read_rows(config)
    config = _with_answer_length(config, rows, tokenizer)
    for num_fewshot in config.num_fewshot:
        task = resolve_settings(config, num_fewshot, tokenization)
        next(_build_items(task, rows, num_fewshot, tokenizer, max_seq_len, limit, skipped_rows={}))


def _with_answer_length(config: TaskConfig, rows: list[Row], tokenizer: Tokenizer) -> TaskConfig:
    """Return the task's configuration with `max_new_tokens` filled in, if answers are generated and it is not set."""
    if answer_of(config) != "generation" or config.max_new_tokens is not None:
        return config
    return replace(config, max_new_tokens=limit_answer_tokens(config, rows, tokenizer))


def _build_items(
    config: TaskConfig,
    rows: list[Row],
    num_fewshot: int,
    tokenizer: Tokenizer,
    max_seq_len: int,
    limit: int | None,
    skipped_rows: dict[str, list[int]],
) -> Iterator[Item]:
    """Yield the item of each question that the model can be asked, in the order of the rows.

    config: the task's configuration, as `resolve_settings` returns it.
    limit: the largest number of questions, skipped ones included; None for all.
    skipped_rows: a dict from a reason to row indices. This function adds the rows that it skips to it.

    Raises DataError if there are too few rows for the examples, and EmptyTaskError at the end if no row was usable.
    """
    example_groups = group_examples(config, rows)
    _check_number_of_examples(config, example_groups, num_fewshot)

    encoding = Encoding(tokenizer, config, max_seq_len)
    num_items = 0
    for index in find_question_rows(config, rows, num_fewshot)[:limit]:
        group = example_groups.get(category_of(config, rows[index]), [])
        examples = choose_examples(config, group, index, num_fewshot)
        try:
            item = _build_item(config, rows, index, examples, encoding)
        except UnusableItemError as reason:
            skipped_rows.setdefault(str(reason), []).append(index)
            continue
        num_items += 1
        # A category that is smaller than the others may have fewer rows than a prompt should have examples.
        yield replace(item, num_missing_examples=num_fewshot - len(examples))

    if num_items == 0:
        reasons = ", ".join(f"{len(indices)} with {reason}" for reason, indices in skipped_rows.items())
        raise EmptyTaskError(f"{config.label}: no item can be asked of a model of {max_seq_len} tokens: {reasons}")


def _check_number_of_examples(config: TaskConfig, example_groups: Mapping[str, list[int]], num_fewshot: int) -> None:
    """Raise DataError if no category has enough rows for the examples of a prompt.

    `example_groups` are the rows from which examples are drawn, by category. Unless they are of a split of their own,
    one of them is the question.
    """
    largest_group_rows = max(len(group) for group in example_groups.values())
    has_own_split = config.fewshot_split is not None
    if num_fewshot < largest_group_rows or (has_own_split and num_fewshot == largest_group_rows):
        return
    which_rows = f" of the split {config.fewshot_split}" if has_own_split else ""
    if config.has_categories:
        which_rows += " in its largest category"
    raise DataError(
        f"{config.label}: {config.dataset_uri} has {largest_group_rows} rows{which_rows}, "
        f"too few for {num_fewshot} examples{'' if has_own_split else ' and a question'}"
    )


def _build_item(config: TaskConfig, rows: list[Row], index: int, examples: list[int], encoding: Encoding) -> Item:
    """Render and tokenise the prompt of one question.

    index: the row of the question.
    examples: the rows of its few-shot examples, in the order in which the prompt shows them.

    For a multiple-choice question with one example, the texts are for instance

        preamble   "2 + 2 = 4"
        context    "\\n1 + 4 = "
        answers    "5" and "6", with a request for each

    Raises UnusableItemError, with the reason, for a question that this model cannot be asked.
    """
    # Render the examples, then the contexts of the question. The first text of a prompt has no delimiter before it.
    row = rows[index]
    preamble = render_prompt_string(config, row)
    for example in examples:
        preamble += render_example(config, rows[example], is_first=not preamble)
    question = read_question(config, row)
    contexts = [render_context(config, context, is_first=not preamble) for context in question.contexts]

    # Tokenise: a prompt to generate from, or one request for each option.
    accepted_answers: Sequence[str] = ()
    gold_request = None
    if answer_of(config) == "generation":
        requests = [encoding.prompt(preamble, context, config.max_new_tokens or 1) for context in contexts]
        accepted_answers = question.answers
        if not any(clean(config, answer) for answer in accepted_answers):
            # Every accepted answer has only punctuation and articles, which normalisation removes.
            raise UnusableItemError("answers with nothing but punctuation and articles")
        # The first right answer is also scored, as an example would show it. Its item can be asked without that.
        with contextlib.suppress(UnusableItemError):
            gold_request = encoding.request(preamble, contexts[0], render_solution(question, accepted_answers[0]))
    else:
        requests = [
            encoding.request(preamble, context, answer)
            for context, answer in zip(contexts, question.answers, strict=True)
        ]

    # Options with the same text cannot be told apart.
    distinct_texts = {text.strip() for text in question.choices}
    return Item(
        index=index,
        requests=tuple(requests),
        gold=question.gold,
        question=question.text,
        choices=tuple(question.choices),
        examples=tuple(examples),
        category=str(row["category"]) if config.has_categories else None,
        answers=tuple(accepted_answers),
        gold_request=gold_request,
        has_duplicates=len(distinct_texts) < len(question.choices),
        row=row if config.own_code else None,
    )
