"""Finding and fetching files, against a server on this computer."""

import hashlib
import http.server
import subprocess
import sys
import threading

import pytest
from conftest import one_line

from fedjax_cfl.data.datasets import download
from fedjax_cfl.data.datasets.download import DATA_ENV_VAR, REGISTRY, Remote, fetch, locate

BODY = b"\0\0\x08\x01" + bytes(5000)
SHA256 = hashlib.sha256(BODY).hexdigest()
NAMES = ("good.gz", "truncated.gz", "wrong.gz", "page.gz", "absent.gz")


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
        self.send_header("Content-Length", str(len(body) * (2 if name == "truncated.gz" else 1)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns an empty cache folder; no data root is named and no proxy used."""
    monkeypatch.setattr(download, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.delenv(DATA_ENV_VAR, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(Handler, "asked", [])
    for name in NAMES:
        monkeypatch.setitem(REGISTRY, name[:-3], Remote("http://127.0.0.1:9/", {name: SHA256}))
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


def test_fetches_once(cache, server):
    assert download.download("good", server) == {"good": [cache / "good" / "good.gz"]}
    assert (cache / "good" / "good.gz").read_bytes() == BODY
    assert (
        fetch("good", offline=True)
        == fetch("good", base_url=server)
        == [cache / "good" / "good.gz"]
    )
    assert Handler.asked == ["good.gz"]
    assert [path.name for path in cache.rglob("*")] == ["good", "good.gz"]  # no temporary file


PROCESS = """
import sys
from pathlib import Path
from fedjax_cfl.data.datasets import download
download.cache_dir = lambda: Path(sys.argv[1])
download.REGISTRY["good"] = download.Remote("http://127.0.0.1:9/", {"good.gz": sys.argv[3]})
print(download.fetch("good", base_url=sys.argv[2])[0].read_bytes() == bytes.fromhex(sys.argv[4]))
"""


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
        ("truncated", "broke off"),
        ("wrong", "SHA-256"),
        ("page", "SHA-256"),
        ("absent", "answered 404"),
        ("good", "no connection"),
    ],
)
def test_bad_answers_leave_nothing(cache, server, name, says):
    # nothing listens at port 9
    one_line(says, fetch, name, base_url="http://127.0.0.1:9/" if name == "good" else server)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_offline_asks_nobody(cache, server):
    one_line(str(cache), fetch, "good", offline=True, base_url=server)
    one_line("good/good.gz", fetch, "good", offline=True, base_url=server)
    assert Handler.asked == []


def test_unknown_name(cache):
    one_line("did you mean 'mnist'?", download.download, ["mnits"])


def test_users_own_files_come_first(cache, server, tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second, cache):
        (folder / "good").mkdir(parents=True)
    monkeypatch.setenv(DATA_ENV_VAR, f"{first}{download.os.pathsep}{second}")
    (cache / "good" / "good.gz").write_bytes(BODY)
    assert locate("good/good.gz") == [cache / "good" / "good.gz"]
    (second / "good" / "good").write_bytes(b"the user's own, unpacked and not verified")
    assert fetch("good", base_url=server) == [second / "good" / "good"]
    assert locate("good/good.gz", "good/other.gz") is None
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path / "typo"))
    one_line("no folder", locate, "good/good.gz")


def test_odd_roots_and_broken_links(cache, server, tmp_path, monkeypatch):
    for odd in ("~nobody_of_this_name", "z" * 300):
        monkeypatch.setenv(DATA_ENV_VAR, odd)
        one_line("no folder", fetch, "good", base_url=server)
    monkeypatch.setenv(DATA_ENV_VAR, str(tmp_path))
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "good.gz").symlink_to(tmp_path / "unmounted")
    # the user's own: its reader will refuse it
    assert fetch("good", base_url=server) == [tmp_path / "good" / "good.gz"]
    assert Handler.asked == []


def test_registry_is_well_formed():
    for name in ("mnist", "fashion_mnist"):
        digests = REGISTRY[name].files.values()
        assert len(set(digests)) == 4 and all(
            len(bytes.fromhex(digest)) == 32 for digest in digests
        )
