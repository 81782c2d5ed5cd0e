"""A configuration that an earlier release recorded -> the same mathematics in the words of this one. No torch.

Owns keys that once meant something else, or did not exist. `checkpoint` asks it about every manifest that it reads, so
that nobody else has to know: a run carries on, is evaluated and is exported as it was trained.
"""

from typing import Any

from llmfoundry_lite.config.model_schema import AttentionConfig
from llmfoundry_lite.config.spans import Duration


def in_words_of_today(config: Any, *, is_imported: bool = False) -> Any:
    """Return `config`, changed in place where its meaning has changed. What is not understood stays as it is.

    `is_imported`: its weights come from LLM Foundry or transformers, which have never computed as earlier releases did.
    """
    model = config.get("model") if isinstance(config, dict) else None
    attention = model.get("attn_config") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(attention, dict) or "norm_type" in attention:
        return config
    # The norms of q and k were the model's. LLM Foundry's are not.
    if (attention.get("qk_ln") or attention.get("qk_gn")) and not is_imported:
        for key in ("norm_type", "norm_eps"):
            attention[key] = model.get(key, getattr(AttentionConfig(), key))
    # rope_hf_config scaled positions whatever rope_impl said. LLM Foundry's dail ignores it.
    scaling = attention.get("rope_hf_config")
    if attention.get("rope") and isinstance(scaling, dict) and scaling.get("type", "no_scaling") != "no_scaling":
        attention["rope_impl"] = "hf"
    _count_in_whole_units(config)
    return config


CUT_SPANS_OF = {"warmup_stable_decay": ("t_decay",), "inv_sqrt_with_warmup": ("t_cooldown",)}
"""Schedule -> spans that it alone uses. Others have them by default, and do not change with them."""


def _count_in_whole_units(config: dict[str, Any]) -> None:
    """`0.05dur` of 4810ba was 240.5ba, and is 240ba, as in Composer. Such a span is written out, so that a run that
    carries on names the change."""
    schedule, end = config.get("scheduler"), config.get("max_duration")
    if not isinstance(schedule, dict):
        return
    for key in ("t_warmup", "t_max", *CUT_SPANS_OF.get(str(schedule.get("name")), ())):
        text = schedule.get(key)
        try:
            run, span = Duration.parse(end), Duration.parse(text, ("dur",))  # type: ignore[arg-type]
            length = span.value * run.value
            if run.unit != "ep" and length != int(length):
                schedule[key] = f"{length:g}{run.unit}"
        except (ValueError, OverflowError):
            continue
