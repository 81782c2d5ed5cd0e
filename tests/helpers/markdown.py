"""Sections, links and commands of a page in Markdown."""

import re


def section(page: str, heading: str) -> str:
    """Return the text under a heading of the second level."""
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.M | re.S))[heading]


def without_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_code(page))


def anchors(page: str) -> set[str]:
    """Name headings as a code host and the site's generator do."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: str) -> list[str]:
    """The lines of fenced blocks without a language, comments and continuations taken care of."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.M | re.S)
    lines = [line for language, block in blocks if not language for line in block.replace("\\\n", " ").splitlines()]
    return [command for line in lines if (command := " ".join(re.sub(r"(^|\s)#\s.*", "", line).split()))]


def quoted_commands(page: str, program: str) -> list[str]:
    """In a sentence or a table: `program …`."""
    spans = [two or one for two, one in re.findall(r"``(.+?)``|`([^`\n]+)`", without_code(page))]
    return [span.strip() for span in spans if span.strip().startswith(program)]
