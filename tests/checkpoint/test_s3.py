"""Checkpoints on S3, over HTTP to a server process: multi-part uploads, dropped connections, the manifest last."""

import os
import uuid
from collections import Counter

import pytest
import torch

from llmfoundry_lite.checkpoint import remote_folder
from llmfoundry_lite.checkpoint.manifest_json import MANIFEST
from llmfoundry_lite.checkpoint.restore import load, load_newest
from llmfoundry_lite.checkpoint.save import open_saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.errors import CheckpointError
from tests.checkpoint.ranks import build, save_now, step, whole_state
from tests.checkpoint.s3_server import DroppingProxy, s3_server
from tests.checkpoint.saves import save, write_draft

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")
AioBaseClient = pytest.importorskip("aiobotocore.client").AioBaseClient
pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def server():
    with s3_server() as port:
        yield port


@pytest.fixture
def connect(server, monkeypatch):
    """A new bucket behind a port."""

    def connected(port=server):
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        bucket = f"run-{uuid.uuid4().hex}"
        s3fs.S3FileSystem().mkdir(bucket)
        return f"s3://{bucket}/checkpoints"

    yield connected
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_run_saves_prunes_and_restores_on_s3(connect):
    url = connect()
    store = CheckpointStore(url)
    saver = open_saver(store)
    model, opt = build("plain")
    for batch in (1, 2, 3):
        step(model, opt, batch)
        save_now(saver, model, opt, batch)
    assert store.prune(saver.lease, keep_newest=2) == ["ba1"]
    fresh, fresh_opt = build("plain", seed=5)
    restored = load_newest(store, fresh, fresh_opt)
    assert restored.url == f"{url}/ba3"
    expected, found = whole_state(model, opt), whole_state(fresh, fresh_opt)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    verify_checkpoint(open_checkpoint(f"{url}/ba2"))
    assert [c.name for c in store.candidates()] == ["ba3", "ba2"]


@pytest.mark.fault
def test_nothing_is_there_until_the_manifest_is(connect):
    store = CheckpointStore(connect())
    lease = store.acquire()
    save(store, lease, 1)
    draft = write_draft(store, lease, 2)
    assert [c.name for c in store.candidates()] == ["ba1"]
    assert MANIFEST not in store.root.child("ba2").names()
    store.publish(draft, lease)
    assert [c.name for c in store.candidates()] == ["ba2", "ba1"]


@pytest.mark.fault
@pytest.mark.parametrize(("name", "other"), {"sweep[1-3]": "sweep1", "run*": "run1", "run?": "run1"}.items())
def test_a_name_like_a_pattern_removes_its_own_keys_and_no_others(connect, name, other):
    bucket = connect().rpartition("/")[0]
    store, beside = CheckpointStore(f"{bucket}/{name}"), CheckpointStore(f"{bucket}/{other}")
    for one in (store, beside):
        save(one, one.acquire(), 1)
        one.root.child("ba1").put("copied", b"from a local disk")
    save(store, store.acquire(), 2)
    before = s3fs.S3FileSystem().find(beside.root.url)
    store.prune(store.acquire(), keep_newest=1)
    s3fs.S3FileSystem.clear_instance_cache()
    assert s3fs.S3FileSystem().find(beside.root.url) == before
    assert "ba1" not in store.root.names()
    verify_checkpoint(open_checkpoint(f"{store.root.url}/ba2"))


def test_a_save_asks_the_server_little_however_many_checkpoints_there_are(connect, monkeypatch):
    store = CheckpointStore(connect())
    lease = store.acquire()
    for batch in range(1, 6):
        save(store, lease, batch)
    counts, call = Counter(), AioBaseClient._make_api_call

    async def counted(self, method, *args, **kwargs):
        counts[method] += 1
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(AioBaseClient, "_make_api_call", counted)
    saved = save(store, lease, 6)
    assert sum(counts.values()) <= 2 * len(saved.manifest.files) + 10, counts
    counts.clear()
    assert len(store.candidates()) == 6
    assert sum(counts.values()) <= 6 + 2, counts


@pytest.mark.fault
def test_the_lease_is_claimed_by_one(connect):
    url = connect()
    first, second = CheckpointStore(url), CheckpointStore(url)
    old = first.acquire()
    draft = write_draft(first, old, 1)
    assert second.acquire().epoch == 2
    with pytest.raises(CheckpointError, match="another launch"):
        first.publish(draft, old)
    with pytest.raises(FileExistsError):
        second.leases.folder.put("00000002.json", b"{}", only_if_new=True)


@pytest.mark.fault
def test_a_second_look_is_past_what_was_listed(connect):
    folder = CheckpointStore(connect()).root
    folder.put("file", b"12")
    assert folder.sizes() == {"file": 2}
    elsewhere = s3fs.S3FileSystem(skip_instance_cache=True)
    for name, content in (("file", b"123"), ("new", b"1")):
        elsewhere.pipe_file(f"{folder.url}/{name}", content)
    assert [folder.source(name, is_anew=True).num_bytes for name in ("file", "new")] == [3, 1]


@pytest.mark.fault
def test_an_empty_manifest_is_damage(connect):
    store = CheckpointStore(connect())
    lease = store.acquire()
    for batch in (1, 2):
        save(store, lease, batch)
    store.root.child("ba2").put(MANIFEST, b"")
    found = store.newest_intact(verify_checkpoint)
    assert found.checkpoint is not None and found.checkpoint.name == "ba1"
    assert "passed over damaged checkpoint" in found.notes[0]


@pytest.mark.fault
@pytest.mark.parametrize("max_parts", [10_000, 2])
def test_large_shards_go_in_parts_and_those_grow_with_the_shard(connect, monkeypatch, max_parts):
    monkeypatch.setattr(remote_folder, "REMOTE_PART_BYTES", 5 << 20)
    monkeypatch.setattr(remote_folder, "MAX_PARTS", max_parts)
    url = connect()
    model = torch.nn.Linear(2048, 2048)
    save_now(open_saver(CheckpointStore(url)), model, None, 1)
    checkpoint = open_checkpoint(f"{url}/ba1")
    verify_checkpoint(checkpoint)
    name = checkpoint.manifest.files[0].name
    etag = s3fs.S3FileSystem().info(f"{url}/ba1/{name}")["ETag"]
    num_parts = int(etag.strip('"').rsplit("-", 1)[1])  # S3 counts the parts there
    assert num_parts == 2 if max_parts == 2 else num_parts > 2
    other = torch.nn.Linear(2048, 2048)
    load(f"{url}/ba1", other)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.fault
@pytest.mark.slow
def test_dropped_connections_are_retried_or_reported_but_never_damage(connect, server):
    url = connect()
    proxy = DroppingProxy(server, drop_rate=0.0)
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
    s3fs.S3FileSystem.clear_instance_cache()
    store = CheckpointStore(url)
    lease = store.acquire()
    proxy.drop_rate = 0.3
    published, batch = [], 0
    while (proxy.num_dropped < 4 or not published) and batch < 30:
        batch += 1
        s3fs.S3FileSystem.clear_instance_cache()
        store = CheckpointStore(url)
        try:
            save(store, lease, batch)
            published.append(batch)
        except (CheckpointError, OSError):
            pass
    assert proxy.num_dropped >= 4 and published
    proxy.drop_rate = 0.0
    s3fs.S3FileSystem.clear_instance_cache()
    for candidate in CheckpointStore(url).candidates():
        assert candidate.checkpoint is not None
        verify_checkpoint(candidate.checkpoint)
    names = {candidate.name for candidate in CheckpointStore(url).candidates()}
    assert {f"ba{batch}" for batch in published} <= names
    proxy.shutdown()
    proxy.server_close()
