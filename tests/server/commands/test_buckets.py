"""Checkpoints in object stores. fsspec's store in memory stands for the others."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from server.commands import buckets
from server.commands.console import UserError

FILES = {"config.json": b"{}", "tokenizer.json": b"{1}", "model.safetensors": b"weights", "README.md": b"words"}
NEEDED = {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    store = fsspec.filesystem("memory")
    for name, data in FILES.items():
        store.pipe(f"/bucket/demo/{name}", data)
    yield store
    store.rm("/bucket", recursive=True)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("model", ["memory://bucket/demo", "memory:/bucket/demo/"])
def test_the_files_that_are_needed_are_downloaded(model: str, tmp_path: Path) -> None:
    assert buckets.is_url(model)
    folder = buckets.directory(model, tmp_path)
    assert folder == tmp_path / "memory" / "bucket" / "demo"
    assert {path.name for path in folder.iterdir() if path.suffix != ".json" or path.name in FILES} == NEEDED
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.usefixtures("store")
def test_a_store_that_lists_names_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As s3fs does."""
    memory = type(fsspec.filesystem("memory"))
    ls = memory.ls
    monkeypatch.setattr(memory, "ls", lambda self, path, detail=False, **others: ls(self, path, detail, **others))
    assert (buckets.directory("memory://bucket/demo", tmp_path) / "config.json").exists()


def test_only_what_has_changed_is_downloaded_again(store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = buckets.directory("memory://bucket/demo", tmp_path)
    assert "downloading 3 files" in capfd.readouterr().err
    buckets.directory("memory://bucket/demo", tmp_path)
    assert "files" not in capfd.readouterr().err
    store.pipe("/bucket/demo/model.safetensors", b"others!")
    store.rm("/bucket/demo/tokenizer.json")
    buckets.directory("memory://bucket/demo", tmp_path)
    assert "downloading 1 files" in capfd.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == b"others!"
    assert not (folder / "tokenizer.json").exists()


def test_a_download_that_broke_off_is_resumed(store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(source: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("the connection is gone")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "get_file", staticmethod(get))
        with pytest.raises(UserError, match="the connection is gone"):
            buckets.directory("memory://bucket/demo", tmp_path)
    folder = buckets.directory("memory://bucket/demo", tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in FILES} == {
        name: FILES[name] for name in NEEDED
    }
    assert not list(folder.glob("*.part"))


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("memory://bucket/none", "--model memory://bucket/none: there is no such folder"),
        ("memory://bucket", "the folder has no config.json"),
        ("gs://bucket/demo", "pip install 'jaxserve\\[gs\\]'"),
        ("nonsense://bucket/demo", "--model nonsense://bucket/demo: Protocol not known: nonsense"),
    ],
)
def test_what_is_wrong_is_told(model: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        buckets.directory(model, tmp_path)


@pytest.mark.parametrize("model", ["org/name", "/a/folder", "folder", "C"])
def test_other_texts_are_no_urls(model: str) -> None:
    assert not buckets.is_url(model)
