"""The doctor's findings by name."""

from collections.abc import Iterable

from llmfoundry_machines.doctor.finding import CheckOptions, Finding, Status

QUICK = CheckOptions(quick=True)


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    findings = list(findings)
    assert all(finding.fix for finding in findings if finding.status in (Status.WARN, Status.FAIL))
    return {finding.check: finding for finding in findings}
