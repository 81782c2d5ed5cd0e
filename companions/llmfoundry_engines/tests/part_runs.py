"""Functions that tests of parts share."""

import json
from pathlib import Path

from llmfoundry_engines import reports
from llmfoundry_engines.part import Part
from llmfoundry_engines.prepare_part import prepare_part
from llmfoundry_lite.prepare.request import PrepareRequest


def prepare_parts(wanted: PrepareRequest, out: Path, numbers: list[int], count: int) -> None:
    """Tokenise some parts, one after the other."""
    for number in numbers:
        prepare_part(wanted, out, Part(number, count), num_workers=1)


def change_report(out: Path, part: Part, change: dict) -> None:
    """Change some values in the report of a part."""
    file = out / ".partial/parts" / part.folder_name / reports.REPORT_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
