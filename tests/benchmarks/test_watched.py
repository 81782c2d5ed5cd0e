"""The benchmark of runs that are watched: what it compares, and one small round of it."""

import json
import urllib.request

import pytest

from benchmarks import watched


def test_alerts_are_counted():
    with watched.receive_alerts() as receiver:
        request = urllib.request.Request(receiver.url, json.dumps({"event": "ended"}).encode(), method="POST")
        assert urllib.request.urlopen(request).status == 204
        assert receiver.num_received == 1


@pytest.mark.long
def test_watching_changes_no_number(tmp_path):
    report = watched.run("tiny", 64, num_batches=30, num_rounds=1, out=tmp_path)
    assert report["passed"]
    rows = json.loads((tmp_path / "watched.json").read_text())["tables"][0]["rows"]
    assert [row[0] for row in rows] == [watched.PLAIN, watched.WATCHED]
    assert "alerts received in a watched launch: 1;" in (tmp_path / "watched.md").read_text()
