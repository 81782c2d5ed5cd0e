"""Parts that foreign formats add to the core."""

from llmfoundry_lite.companions import Companion

COMPANION = Companion(
    readers={
        "checkpoints of Composer and DCP": "llmfoundry_formats.checkpoints:import_pickled",
        "causal models of other types": "llmfoundry_formats.plain_models:open_plain",
        "folders of GPT-2, Llama, Mistral and Qwen": "llmfoundry_formats.layouts:find_layout",
        "pytorch_model.bin": "llmfoundry_formats.pickles:read_weights_file",
        "hf:// data sets of tasks": "llmfoundry_formats.hub_tasks:read_hub",
        "hf: data sets of text": "llmfoundry_formats.hub_texts:open_hub",
        "hf: models to import": "llmfoundry_formats.hub_models:fetch_to_import",
        "hf: models to evaluate": "llmfoundry_formats.hub_models:fetch_to_evaluate",
        "tokenizers without tokenizer.json": "llmfoundry_formats.old_tokenizers:convert_with_transformers",
        "rows of CSV, parquet and arrow": "llmfoundry_formats.tables:cut_table",
        "rows of parquet and arrow": "llmfoundry_formats.tables:read_table",
        "logs of lm-eval and Inspect": "llmfoundry_formats.logs:load_logs",
    },
    builders={"fast encoder of text: gigatoken": "llmfoundry_formats.fast_encoder:FastEncoder"},
)
