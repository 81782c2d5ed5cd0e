"""The package's page on an index: README.md with absolute links, and the project's links.

    LLMFOUNDRY_LITE_URL=https://HOST/OWNER/llmfoundry_lite uv build

Hatchling runs this hook whenever it makes the package's metadata. Links stay relative in the repository, and in a
package that is built without the variable.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface  # pyright: ignore[reportMissingImports]


class IndexPage(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        url, tag = os.environ.get("LLMFOUNDRY_LITE_URL", "").rstrip("/"), f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, url, tag) if url else text}
        page = f"{url}/blob/{tag}"
        names = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
        metadata["urls"] = {"Repository": url, **{name: f"{page}/{at}" for name, at in names.items()}} if url else {}


def absolute(text: str, url: str, tag: str) -> str:
    """Return Markdown whose links and pictures lead to the files of a release."""

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}({url}/{'raw' if found[1].startswith('!') else 'blob'}/{tag}/{found[2]})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", replace, text)
