"""A key that a folder's config.json leaves out counts as transformers counts it."""

import pytest
from transformers import AutoConfig

from llmfoundry_lite.convert.hf_format import ConfigField
from llmfoundry_lite.convert.hf_formats import GPT2, LLAMA, MISTRAL, MPT, QWEN2, QWEN3
from llmfoundry_lite.convert.huggingface import MODEL_TYPES


@pytest.mark.parametrize("layout", [MPT, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3], ids=MODEL_TYPES)
def test_the_default_of_a_key_is_that_of_transformers(layout):
    known = AutoConfig.for_model(layout.fields["model_type"]).to_dict()
    known |= {f"attn_config.{key}": value for key, value in (known.get("attn_config") or {}).items()}
    fields = {key: one for key, one in layout.fields.items() if isinstance(one, ConfigField) and key in known}
    defaults = {key: field.default for key, field in fields.items() if field.default is not ...}
    assert len(defaults) >= 3
    assert defaults == {key: known[key] for key in defaults}
