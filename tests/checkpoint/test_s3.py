"""Checkpoints on S3, over HTTP to a server process: multi-part uploads, dropped connections, the manifest last."""

import contextlib
import errno
import gc
import os
import socketserver
import threading
import uuid
from collections import Counter

import pytest
import torch
from fsspec.asyn import get_loop, sync_wrapper
from fsspec.config import conf

from llmfoundry_lite import retry
from llmfoundry_lite.checkpoint import commit, remote_folder, start
from llmfoundry_lite.checkpoint.manifest import MANIFEST
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.restore import load, load_newest
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.start import check_access
from llmfoundry_lite.checkpoint.store import CheckpointStore, open_checkpoint
from llmfoundry_lite.checkpoint.verify import verify_checkpoint
from llmfoundry_lite.config.load_train import load_train_config
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.launch_train import check_access_to_saves
from tests.checkpoint.ranks import about, build, save_now, step, whole_state
from tests.checkpoint.s3_server import DroppingProxy, Faults, RefusingProxy, s3_server
from tests.checkpoint.saves import names, save, saved, write_draft

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
    saver = Saver(store)
    saver.take_lease()
    model, opt = build("plain")
    for batch in (1, 2, 3):
        step(model, opt, batch)
        save_now(saver, model, opt, batch)
    assert prune(store, saver.lease, keep_newest=2) == ["ba1"]
    fresh, fresh_opt = build("plain", seed=5)
    restored = load_newest(store, fresh, fresh_opt)
    assert restored.url == f"{url}/ba3"
    expected, found = whole_state(model, opt), whole_state(fresh, fresh_opt)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    verify_checkpoint(open_checkpoint(f"{url}/ba2"))
    assert names(store) == ["ba3", "ba2"]


@pytest.mark.fault
def test_nothing_is_there_until_the_manifest_is(connect):
    store, lease = saved(connect(), 1)
    draft = write_draft(store, lease, 2)
    assert names(store) == ["ba1"]
    assert MANIFEST not in store.root.child("ba2").names()
    store.publish(draft, lease)
    assert names(store) == ["ba2", "ba1"]


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
    prune(store, store.acquire(), keep_newest=1)
    s3fs.S3FileSystem.clear_instance_cache()
    assert s3fs.S3FileSystem().find(beside.root.url) == before
    assert "ba1" not in store.root.names()
    verify_checkpoint(open_checkpoint(f"{store.root.url}/ba2"))


@pytest.mark.fault
@pytest.mark.parametrize("knows", ["If-Match", "no condition"])
def test_a_prune_beside_a_running_save_removes_no_other_save(connect, monkeypatch, knows):
    """The save takes the name before the look, after it, or (where no server could help) after the removal."""
    store = CheckpointStore(connect())
    lease, look, late = store.acquire(), commit.head_of, []
    for batch in (1, 2):
        save(store, lease, batch)

    def compared(folder):
        found = look(folder)
        if folder.url.endswith("ba1") and not late and knows == "If-Match":
            late.append(save(store, lease, 1))
        return found

    def removed(phase):
        if phase == "mid-prune" and not late:
            late.append(save(store, lease, 1))

    monkeypatch.setattr(commit, "head_of", compared)
    if knows == "no condition":
        call = s3fs.S3FileSystem._call_s3

        async def refuse(self, method, *args, **kwargs):
            if "IfMatch" in kwargs:
                raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
            return await call(self, method, *args, **kwargs)

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", refuse)
        monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", sync_wrapper(refuse))
    pruner = CheckpointStore(store.root.url, on_phase=removed)
    prune(pruner, None, keep_newest=1)
    assert [candidate.head.save_id for candidate in store.candidates()][1:] == [late[0].manifest.save_id]
    verify_checkpoint(open_checkpoint(f"{store.root.url}/ba1"))
    assert prune(pruner, None, keep_newest=1) == ["ba1"]
    assert names(store) == ["ba2"]


@pytest.mark.fault
def test_a_prune_finishes_a_removal_that_failed_once_the_manifest_was_gone(connect, monkeypatch):
    """The answer to the removal of the manifest was lost. A save that is being written stays."""
    store = CheckpointStore(connect())
    lease = store.acquire()
    for batch in (1, 2, 3):
        save(store, lease, batch)
    draft = write_draft(store, lease, 4)
    removed = remote_folder.RemoteFolder.remove_version

    def lose_the_answer(folder, name, version):
        removed(folder, name, version)
        raise OSError("Connection was closed before we received a valid response")

    monkeypatch.setattr(remote_folder.RemoteFolder, "remove_version", lose_the_answer)
    with pytest.raises(CheckpointError, match="ba1: cannot be removed"):
        prune(store, None, keep_newest=2)
    monkeypatch.setattr(remote_folder.RemoteFolder, "remove_version", removed)
    assert names(store) == ["ba3", "ba2"] and "ba1" in store.root.names()
    assert prune(store, None, keep_newest=2) == []
    assert "ba1" not in store.root.names()
    store.publish(draft, lease)
    verify_checkpoint(open_checkpoint(f"{store.root.url}/ba4"))


def uploads_of(bucket):
    found = s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=bucket)
    return sorted(upload["Key"] for upload in found.get("Uploads", []))


@pytest.mark.fault
def test_a_launch_aborts_the_uploads_of_dead_writers_of_its_run_alone(connect):
    bucket = connect().split("/")[2]
    store, _ = saved(f"s3://{bucket}/run1", 1)
    dead = [
        *(f"run1/ba{batch}/e1-ba{batch}-0a/shard-00000.safetensors" for batch in (2, 3)),
        "run1/log/e1-ba2-0a.jsonl",
    ]
    others = [
        "run1/ba4/e3-ba4-0a/shard",
        "run1/sub/ba2/e1-ba2-0a/shard",
        "run1/mine",
        "run1",
        "run10/ba2/e1-ba2-0a/shard",
    ]
    for key in (*dead, *others, "ba2/e1-ba2-0a/shard"):
        s3fs.S3FileSystem().call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    assert store.acquire().epoch == 2
    assert uploads_of(bucket) == sorted([*others, "ba2/e1-ba2-0a/shard"])
    CheckpointStore(f"s3://{bucket}").root.abort_uploads(lambda path: path.startswith("ba2/"))
    assert uploads_of(bucket) == sorted(others)


def test_a_save_asks_the_server_little_however_many_checkpoints_there_are(connect, monkeypatch):
    store, lease = saved(connect(), *range(1, 6))
    counts, call = Counter(), AioBaseClient._make_api_call

    async def counted(self, method, *args, **kwargs):
        counts[method] += 1
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(AioBaseClient, "_make_api_call", counted)
    sixth = save(store, lease, 6)
    assert sum(counts.values()) <= 2 * len(sixth.manifest.files) + 10, counts
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
def test_a_server_that_knows_no_conditional_put_gives_a_lease_too(proxy):
    proxy.refuses = lambda method, path, headers: "NotImplemented" if "If-None-Match" in headers else None
    store = CheckpointStore(proxy.url)
    store.check(store.acquire())
    assert proxy.num_refused and store.acquire().epoch == 2


@pytest.mark.fault
def test_a_server_that_is_busy_with_the_same_key_may_answer_later(proxy):
    proxy.refuses = lambda method, path, headers: "ConditionalRequestConflict" if "If-None-Match" in headers else None
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(proxy.url).acquire()
    assert caught.value.is_transient


@pytest.mark.fault
def test_a_second_look_is_past_what_was_listed(connect):
    folder = CheckpointStore(connect()).root
    folder.put("file", b"12")
    assert folder.sizes() == {"file": 2}
    elsewhere = s3fs.S3FileSystem(skip_instance_cache=True)
    for name, content in (("file", b"123"), ("new", b"1")):
        elsewhere.pipe_file(f"{folder.url}/{name}", content)
    assert [folder.source(name, bypass_cache=True).num_bytes for name in ("file", "new")] == [3, 1]


@pytest.mark.fault
def test_an_empty_manifest_is_damage(connect):
    store, _lease = saved(connect(), 1, 2)
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
    save_now(Saver(CheckpointStore(url)), model, None, 1)
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
    store, lease = saved(url)
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
    assert {f"ba{batch}" for batch in published} <= set(names(CheckpointStore(url)))
    proxy.shutdown()
    proxy.server_close()


STYLE = {"s3": {"addressing_style": "path"}, "signature_version": "s3v4"}
FEW = {"total_max_attempts": 2, "mode": "standard"}


@pytest.mark.parametrize(
    ("configured", "used"),
    [
        ({}, {"retries": FEW}),
        (STYLE, {**STYLE, "retries": FEW}),
        ({"retries": {"max_attempts": 7}}, {"retries": {"max_attempts": 7}}),
    ],
)
def test_the_users_options_of_the_client_stay(configured, used, monkeypatch):
    """As a store that knows no other than path-style addresses needs them."""
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    monkeypatch.setitem(conf, "s3", {"config_kwargs": configured})
    s3fs.S3FileSystem.clear_instance_cache()
    folder = open_folder("s3://bucket/run")
    assert folder.filesystem.config_kwargs == used
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_number_of_attempts_in_the_aws_configuration_counts(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    (tmp_path / "config").write_text("[default]\nmax_attempts = 9\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    s3fs.S3FileSystem.clear_instance_cache()
    assert "retries" not in open_folder("s3://bucket/run").filesystem.config_kwargs
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def proxy(connect, server, monkeypatch):
    """Put a proxy before the server of a new bucket. The client asks once, without retries."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0,) * 3)
    proxy = RefusingProxy(server)
    proxy.url = connect()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    s3fs.S3FileSystem.clear_instance_cache()
    yield proxy
    proxy.close()


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("code", ["SlowDown", "InternalError", "ExpiredToken"])
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_server_that_refuses_a_save_for_a_while_costs_that_save(proxy, code, method):
    """Shard and manifest, or what is asked before they are put."""
    model, opt = build("plain")
    saver = Saver(CheckpointStore(proxy.url))
    saver.take_lease()
    save_now(saver, model, opt, 1)
    first = whole_state(model, opt)
    step(model, opt, 1)
    proxy.refuses = lambda asked, path, headers: code if asked == method else None
    saver.save(model, opt, about(2))
    with pytest.raises(CheckpointError) as caught:
        saver.wait()
    assert caught.value.is_transient and proxy.num_refused
    proxy.refuses = lambda asked, path, headers: None
    assert names(CheckpointStore(proxy.url)) == ["ba1"]
    fresh, fresh_opt = build("plain", seed=5)
    load(f"{proxy.url}/ba1", fresh, fresh_opt)
    found = whole_state(fresh, fresh_opt)
    assert all(torch.equal(found[name], first[name]) for name in first)
    save_now(saver, model, opt, 3)
    verify_checkpoint(open_checkpoint(f"{proxy.url}/ba3"))


@pytest.mark.fault
@pytest.mark.parametrize(("code", "may_pass"), [("SlowDown", True), ("ExpiredToken", True), ("AccessDenied", False)])
def test_a_server_that_refuses_everything_says_whose_fault_it_is(proxy, code, may_pass):
    proxy.refuses = lambda method, path, headers: code
    for ask in (CheckpointStore(proxy.url).candidates, CheckpointStore(proxy.url).acquire):
        with pytest.raises(CheckpointError) as caught:
            ask()
        assert caught.value.is_transient == may_pass


@pytest.mark.slow
@pytest.mark.fault
def test_a_server_that_has_gone_is_told_by_the_error_alone_and_by_no_traceback(connect, monkeypatch, caplog):
    """A port that takes connections and closes them: aiohttp's task that sends the request fails beside the request."""
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0,) * 3)
    folder = open_folder(connect())
    folder.put("file", b"1")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as closing:
        threading.Thread(target=closing.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closing.server_address[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        folder = open_folder(folder.url)
        for _ in range(3):
            with pytest.raises(OSError, match="endpoint URL"):
                folder.put("file", b"2")
        closing.shutdown()

    has_collected = threading.Event()
    get_loop().call_soon_threadsafe(lambda: (gc.collect(), has_collected.set()))  # tasks report when collected
    assert has_collected.wait(60)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_other_errors_on_the_loop_of_the_client_are_still_printed(connect, caplog):
    open_folder(connect())
    error = {"message": "Task exception was never retrieved", "exception": ZeroDivisionError("a bug")}
    get_loop().call_exception_handler(error)
    assert [record.exc_info[1] for record in caplog.records if record.name == "asyncio"] == [error["exception"]]


def test_a_bucket_that_is_not_there_is_a_mistake(connect):
    connect()
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore("s3://no-such-bucket/run").acquire()
    assert not caught.value.is_transient


@pytest.mark.fault
@pytest.mark.slow
def test_credentials_that_have_expired_are_read_again(proxy, tmp_path, monkeypatch):
    """Also those of an upload that is under way: the next save begins with new ones."""
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def give(key):
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = test\n")

    def refuse(key):
        proxy.refuses = lambda method, path, headers: "ExpiredToken" if f"Credential={key}/" in str(headers) else None

    give("first")
    model, opt = build("plain")
    saver = Saver(CheckpointStore(proxy.url))
    saver.take_lease()
    save_now(saver, model, opt, 1)
    refuse("first"), give("second")
    assert names(saver.store) == ["ba1"]
    save_now(saver, model, opt, 2)
    refuse("second"), give("third")
    saver.save(model, opt, about(3))
    with pytest.raises(CheckpointError, match="not written"):
        saver.wait()
    save_now(saver, model, opt, 4)
    assert names(CheckpointStore(proxy.url)) == ["ba4", "ba2", "ba1"]


@pytest.fixture
def faults(proxy, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    proxy.refuses = Faults(0, tmp_path / "credentials")
    return proxy.refuses


class Saves:
    """A run that saves, restores and prunes through faults, and what must be there at each moment."""

    def __init__(self, url):
        self.url, self.batch, self.newest = url, 0, 0
        self.states = {}
        """Batch -> state of every save that was begun: it may be published though its answer was lost."""
        self.model = torch.nn.Linear(1000, 1000)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.saver = None

    def launch(self):
        self.saver = Saver(CheckpointStore(self.url))
        self.saver.take_lease()

    def save(self):
        self.batch += 1
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, float(self.batch % 3 - 1))
        self.opt.step()
        self.states[self.batch] = whole_state(self.model, self.opt)
        save_now(self.saver, self.model, self.opt, self.batch)
        self.newest = self.batch

    def restore(self):
        model = torch.nn.Linear(1000, 1000)
        opt = torch.optim.AdamW(model.parameters(), lr=0.5)
        restored = load_newest(CheckpointStore(self.url), model, opt)
        found = restored.manifest.timestamp.batch if restored.manifest is not None else 0
        assert found >= self.newest, f"ba{self.newest} had been saved; {restored.notes}"
        if found:
            expected, state = self.states[found], whole_state(model, opt)
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in state), f"ba{found}"

    def prune(self):
        prune(self.saver.store, self.saver.lease, keep_newest=2)


@pytest.mark.fault
@pytest.mark.parametrize(
    "num_faults", [pytest.param(10, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.long)]
)
def test_through_random_faults_nothing_is_lost_and_what_is_restored_was_committed(
    proxy, faults, monkeypatch, num_faults
):
    """Storms of 503, requests and answers lost or cut, slow lists, tokens that expire in the middle of a save."""
    monkeypatch.setattr(remote_folder, "REMOTE_PART_BYTES", 5 << 20)
    run, outcomes = Saves(proxy.url), Counter()
    run.launch()
    steps = {"save": 6, "restore": 3, "prune": 1, "launch": 1}
    while faults.num_hit.total() < num_faults:
        (name,) = faults.random.choices(list(steps), list(steps.values()))
        with faults.one() as kind:
            try:
                getattr(run, name)()
                outcomes[name, "done"] += 1
            except CheckpointError as error:
                assert error.is_transient, f"{name}, {kind}: {error!r}"
                outcomes[name, "failed"] += 1
    assert outcomes["save", "done"] and outcomes["restore", "done"], outcomes
    if num_faults == 50:
        assert set(faults.num_hit) == set(Faults.KINDS) and min(faults.num_hit.values()) >= 3, faults.num_hit
        assert outcomes["save", "failed"] >= 5 and outcomes["restore", "failed"], outcomes
    run.restore()
    for candidate in CheckpointStore(proxy.url).candidates():
        verify_checkpoint(candidate.open())
    run.launch()
    run.save()
    run.restore()
    run.prune()
    assert len(names(CheckpointStore(proxy.url))) == 2


@pytest.mark.fault
def test_a_bucket_that_refuses_everything_is_reported_after_a_few_requests(server, connect, monkeypatch):
    """Three layers repeat a request: by their defaults a hundred times, for minutes."""
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0,) * len(retry.PAUSES_SECONDS))
    proxy = RefusingProxy(server)
    try:
        store, lease = saved(connect(proxy.port), 1)
        proxy.refuses = lambda method, path, headers: "SlowDown"
        with pytest.raises(OSError, match="SlowDown"):
            write_draft(store, lease, 2)
        assert proxy.num_refused <= 6
    finally:
        proxy.close()


@pytest.mark.fault
@pytest.mark.parametrize(("code", "may_pass"), [("ExpiredToken", True), ("AccessDenied", False)])
def test_a_launch_asks_for_its_saves_before_torch_is_imported(proxy, tmp_path, monkeypatch, capsys, code, may_pass):
    """The launcher of `train -n` goes on after a fault that may pass, because its ranks try again."""
    monkeypatch.setenv("RANK", "0")
    config = load_train_config(["mpt-quickstart", f"save_folder={proxy.url}", f"run_folder={tmp_path}"], {}).config
    check_access_to_saves(config)
    proxy.refuses = lambda method, path, headers: code
    with pytest.raises(CheckpointError, match=f"{proxy.url}: cannot be listed: {code}") as caught:
        check_access_to_saves(config)
    assert caught.value.is_transient == may_pass

    capsys.readouterr()
    with contextlib.nullcontext() if may_pass else pytest.raises(CheckpointError):
        check_access_to_saves(config, is_launcher=True)
    assert capsys.readouterr().err.startswith(f"warning: {proxy.url}: cannot be listed") == may_pass

    monkeypatch.setenv("RANK", "1")
    check_access_to_saves(config)


@pytest.mark.fault
def test_a_load_path_is_asked_for_only_if_the_run_has_no_checkpoint(proxy, tmp_path):
    proxy.refuses = lambda method, path, headers: "AccessDenied" if "/another" in path else None
    on_disk = str(tmp_path / "checkpoints")
    for save_folder in (proxy.url, on_disk):
        settings = [f"save_folder={save_folder}", "load_path=s3://another/run", "load_weights_only=true"]
        config = load_train_config(["mpt-quickstart", *settings, f"run_folder={tmp_path}"], {}).config
        with pytest.raises(CheckpointError, match="load_path: s3://another/run: cannot be listed") as caught:
            check_access(config)
        assert caught.value.needs_credentials
        checkpoint = open_folder(f"{save_folder}/ba1")
        checkpoint.make(with_parents=True)
        checkpoint.put("manifest.json", b"{}")
        num_refused = proxy.num_refused
        check_access(config)
        assert proxy.num_refused == num_refused


@pytest.mark.fault
def test_a_bucket_that_does_not_answer_holds_up_a_launch_briefly(proxy, tmp_path, monkeypatch, capsys):
    """The ranks, or this rank once torch is imported, ask again with more time."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(start, "LISTING_SECONDS", 0.2)
    config = load_train_config(["mpt-quickstart", f"save_folder={proxy.url}", f"run_folder={tmp_path}"], {}).config
    is_over = threading.Event()
    proxy.refuses = lambda method, path, headers: is_over.wait(30) and None
    try:
        for is_launcher in (True, False):
            check_access_to_saves(config, is_launcher=is_launcher)
            printed = capsys.readouterr().err
            assert printed.startswith(
                f"warning: {proxy.url}: cannot be listed: no answer for 0.2 s; the launch goes on"
            )
    finally:
        is_over.set()
    assert CheckpointStore(proxy.url).names() == []
