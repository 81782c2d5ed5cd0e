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
    """The hook that Hatchling calls by the name of its class."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls` of the package's metadata. Without the variable, `urls` is empty."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        urls = {}
        repository_url = os.environ.get("LLMFOUNDRY_LITE_URL", "").rstrip("/")
        if repository_url:
            tag = f"v{metadata['version']}"
            readme = absolute(readme, repository_url, tag)
            urls = {
                "Repository": repository_url,
                "Documentation": f"{repository_url}/blob/{tag}/docs/index.md",
                "Changelog": f"{repository_url}/blob/{tag}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
        metadata["urls"] = urls


def absolute(text: str, repository_url: str, tag: str) -> str:
    """Return Markdown whose relative links and pictures lead to the files of a release.

    `[plan](docs/plan.md)` becomes `[plan](URL/blob/v1.0/docs/plan.md)`, and a picture gets `raw` instead of `blob`.
    Links with a scheme, such as https:, and links to a heading stay.
    """

    def make_absolute(link: re.Match[str]) -> str:
        label, path = link.groups()
        kind = "raw" if label.startswith("!") else "blob"
        return f"{label}({repository_url}/{kind}/{tag}/{path})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", make_absolute, text)
