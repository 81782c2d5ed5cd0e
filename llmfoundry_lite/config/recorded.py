"""A configuration that an earlier release recorded -> the same mathematics in the words of this one. No torch.

`checkpoint` applies this to every manifest: a run carries on, is evaluated and is exported as it was trained.
"""

from typing import Any

from llmfoundry_lite.config.model_schema import AttentionConfig


def translate_recorded(config: Any, *, is_imported: bool = False) -> Any:
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
    return config
