"""A type of evaluation task, and a metric of its items."""

from llmfoundry_lite.evaluation.questions import Question


class Rhymes:
    """Which word rhymes? The row has `line`, `words` and the right word in `rhyme`."""

    answer = "choices"
    metric = "sure"

    def __init__(self, task, least_lead=0.0):
        self.least_lead = least_lead

    def read(self, row):
        words = row["words"]
        return Question(
            contexts=[row["line"]] * len(words),
            answers=words,
            gold=words.index(row["rhyme"]),
            text=row["line"],
            choices=words,
        )

    def score(self, outcome):
        return {"sure": lead(outcome) >= self.least_lead}


def lead(outcome, per_token=False):
    """Nats by which the right option is ahead of the best other one."""
    scores = list(outcome.log_probabilities)
    if per_token:
        scores = [score / num_tokens for score, num_tokens in zip(scores, outcome.num_tokens, strict=True)]
    right = scores.pop(outcome.question.gold)
    return right - max(scores)
