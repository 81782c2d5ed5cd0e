"""`data prepare … --out s3://…` without `--part`: the only part of one, and then its join."""

from collections.abc import Callable

from llmfoundry_engines.join import join
from llmfoundry_engines.part import Part
from llmfoundry_engines.prepare_part import prepare_part
from llmfoundry_engines.scratch import Scratch
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.summary import Summary
from llmfoundry_lite.prepare.token_files import MAX_LOST_TEXT


def prepare_in_bucket(
    request: PrepareRequest,
    out: str,
    *,
    num_workers: int | None = None,
    max_lost_text: float = MAX_LOST_TEXT,
    overwrite: bool = False,
    show_progress: bool = False,
    notify: Callable[[str], None] = lambda line: None,
    scratch: Scratch | None = None,
) -> Summary:
    """Prepare a corpus into a bucket. The arguments and the result are those of `prepare` in the core.

    out: URL of the result.
    scratch: where files on their way into the bucket are, and how many bytes of them.
    """
    report = prepare_part(
        request,
        out,
        Part(1, 1),
        num_workers=num_workers,
        max_lost_text=max_lost_text,
        overwrite=overwrite,
        show_progress=show_progress,
        notify=notify,
        scratch=scratch,
    )
    if report is None:
        return join(out, scratch=scratch)  # it has finished before, of which the user was notified
    return join(out, max_lost_text=max_lost_text, show_progress=show_progress, notify=notify, scratch=scratch)
