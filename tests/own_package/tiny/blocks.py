"""A block of a run's YAML: `token_budget: {total: 1000000}`."""

from dataclasses import dataclass

from llmfoundry_lite.config.blocks import RunBlock
from llmfoundry_lite.config.fields import POSITIVE, REQUIRED, setting
from llmfoundry_lite.errors import ConfigError


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenBudgetConfig:
    total: int = setting(REQUIRED, POSITIVE)
    """Tokens that the run is meant to train on."""


def check(config):
    """Raise ConfigError if the budget is smaller than a batch."""
    total = config.blocks["token_budget"].total
    tokens_per_batch = config.global_train_batch_size * config.max_seq_len
    if total < tokens_per_batch:
        raise ConfigError(f"token_budget.total: {total} given, and a batch has {tokens_per_batch}; give at least that")


def describe(config):
    """Return the line of a dry run."""
    return f"token budget  {config.blocks['token_budget'].total:,} tokens"


TOKEN_BUDGET = RunBlock(
    schema=TokenBudgetConfig, check=check, describe=describe, callback="tiny.callbacks:build_token_budget"
)
