"""`python -m llmfoundry_lite` is `llmfoundry-lite`."""

from llmfoundry_lite.cli.main import main

main()
