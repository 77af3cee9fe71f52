"""Finding and fetching files, against a server on this computer."""

import hashlib
import http.server
import io
import subprocess
import sys
import tarfile
import threading

import pytest
from conftest import one_line

from fedjax_cfl.data.datasets import download
from fedjax_cfl.data.datasets.download import (
    DATA_ENV_VAR,
    MEMBERS,
    REGISTRY,
    RETRIES,
    fetch,
    list_public,
    locate,
)

BODY = b"\0\0\x08\x01" + bytes(5000)
SHA256 = hashlib.sha256(BODY).hexdigest()
NAMES = ("good.gz", "truncated.gz", "wrong.gz", "page.gz", "absent.gz", "flaky.gz")


def pack() -> bytes:
    """Returns an archive of two files, and of one that nobody asks for."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("inside/a.bin", "inside/b.bin", "../escaped"):
            info = tarfile.TarInfo(name)
            info.size = len(BODY)
            archive.addfile(info, io.BytesIO(BODY))
    # the time of packing stands in the head of a gzip file
    return content.getvalue()[:4] + bytes(4) + content.getvalue()[8:]


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one answer for each name."""

    asked = []  # noqa: RUF012

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        self.asked.append(name)
        self.send_response(404 if name == "absent.gz" else 200)
        body = {
            "wrong.gz": BODY[::-1],
            "page.gz": b"<html>sign in first</html>",
            "absent.gz": b"no",
        }.get(name, BODY)
        if name == "packed.tar.gz":
            body = pack()
        breaks_off = name == "truncated.gz" or self.asked == ["flaky.gz"]
        self.send_header("Content-Length", str(len(body) * (2 if breaks_off else 1)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch, server):
    """Returns an empty cache folder; no data root is named and no proxy used."""
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.delenv(DATA_ENV_VAR, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(Handler, "asked", [])
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    for name in NAMES:
        remote = f"sha256:{SHA256}", f"{server}/{name}"
        monkeypatch.setitem(REGISTRY, f"{name[:-3]}/{name}", remote)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def server():
    """Returns the address of a running server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/files"
        running.shutdown()
        thread.join()


def test_fetches_once(cache):
    assert fetch("good") == [cache / "good" / "good.gz"]
    assert (cache / "good" / "good.gz").read_bytes() == BODY
    assert fetch("good", offline=True) == [cache / "good" / "good.gz"]
    assert fetch("good") == [cache / "good" / "good.gz"]
    assert Handler.asked == ["good.gz"]
    assert [path.name for path in cache.rglob("*")] == ["good", "good.gz"]  # no temporary file


PROCESS = """
import sys
from pathlib import Path
from fedjax_cfl.data.datasets import download
download.cache_dir = lambda: Path(sys.argv[1])
download.REGISTRY["good/good.gz"] = f"sha256:{sys.argv[3]}", f"{sys.argv[2]}/good.gz"
print(download.fetch("good")[0].read_bytes() == bytes.fromhex(sys.argv[4]))
"""


@pytest.mark.nightly
def test_two_processes_at_once(cache, server):
    command = [sys.executable, "-c", PROCESS, str(cache), server, SHA256, BODY.hex()]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0].strip() for process in both] == ["True", "True"]
    assert [path.name for path in cache.rglob("*")] == ["good", "good.gz"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("truncated", "IncompleteRead"),
        ("wrong", "does not match the known hash"),
        ("page", "does not match the known hash"),
        ("absent", "404 Client Error"),
        ("good", "Max retries exceeded"),
    ],
)
def test_bad_answers_leave_nothing(cache, name, says, monkeypatch):
    if name == "good":  # nothing listens at port 9
        monkeypatch.setitem(REGISTRY, "good/good.gz", (f"sha256:{SHA256}", "http://127.0.0.1:9/"))
    one_line(says, fetch, name)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_offline_asks_nobody(cache):
    one_line(str(cache), fetch, "good", offline=True)
    one_line("good/good.gz", fetch, "good", offline=True)
    assert Handler.asked == []


def test_unknown_name(cache):
    one_line("did you mean 'mnist'?", fetch, "mnits")


def test_users_own_files_come_first(cache, tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second, cache):
        (folder / "good").mkdir(parents=True)
    monkeypatch.setenv(DATA_ENV_VAR, f"{first}{download.os.pathsep}{second}")
    (cache / "good" / "good.gz").write_bytes(BODY)
    assert locate("good/good.gz") == [cache / "good" / "good.gz"]
    (second / "good" / "good").write_bytes(b"the user's own, unpacked and not verified")
    assert fetch("good") == [second / "good" / "good"]
    assert locate("good/good.gz", "good/other.gz") is None
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path / "typo"))
    one_line("no folder", locate, "good/good.gz")


def test_odd_roots_and_broken_links(cache, tmp_path, monkeypatch):
    for odd in ("~nobody_of_this_name", "z" * 300):
        monkeypatch.setenv(DATA_ENV_VAR, odd)
        one_line("no folder", fetch, "good")
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "good.gz").symlink_to(tmp_path / "unmounted")
    # the user's own: its reader will refuse it
    assert fetch("good") == [tmp_path / "good" / "good.gz"]
    assert Handler.asked == []


def test_a_transfer_that_breaks_off_is_tried_again(cache):
    assert fetch("flaky")[0].read_bytes() == BODY
    assert Handler.asked == ["flaky.gz"] * 2
    one_line("IncompleteRead", fetch, "truncated")
    assert Handler.asked.count("truncated.gz") == 1 + RETRIES


def test_an_archive_is_unpacked_where_its_files_are_looked_for(cache, server, monkeypatch):
    name, parts = "packed/packed.tar.gz", ("inside/a.bin", "inside/b.bin")
    digest = f"sha256:{hashlib.sha256(pack()).hexdigest()}"
    monkeypatch.setitem(REGISTRY, name, (digest, f"{server}/packed.tar.gz"))
    monkeypatch.setitem(MEMBERS, name, parts)
    expected = [cache / "packed" / part for part in parts]
    assert fetch("packed") == fetch("packed", offline=True) == expected
    assert [path.read_bytes() for path in expected] == [BODY, BODY]
    assert not list(cache.rglob("escaped")) and Handler.asked == ["packed.tar.gz"]
    expected[1].unlink()
    one_line("packed/inside/b.bin; put it into", fetch, "packed", offline=True)
    monkeypatch.setitem(REGISTRY, name, (f"sha256:{SHA256}", f"{server}/packed.tar.gz"))
    one_line("does not match the known hash", fetch, "packed")
    assert not expected[1].exists(), "nothing is unpacked that is not verified"


def test_registry_is_well_formed():
    assert list_public() == ["mnist", "fashion_mnist", "cifar10", "cifar100", "svhn"]
    digests = [digest.removeprefix("sha256:") for digest, _ in REGISTRY.values()]
    assert len(set(digests)) == 12 and all(len(bytes.fromhex(each)) == 32 for each in digests)
    assert {*MEMBERS} < {*REGISTRY}
    for path, (_, url) in REGISTRY.items():
        assert url.startswith("http") and path.endswith(url.rpartition("/")[2])
