"""Datasets: read in their official formats, and what is missing or wrong is named. All on files made here."""

import gzip
import hashlib
import io
import lzma
import tarfile
from pathlib import Path

import numpy as np
import pytest

from fosi.experiments.data import cifar10, files, imagenet, mnist, shakespeare
from fosi.experiments.data.files import DataError, DataFile


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


@pytest.fixture
def source(tmp_path):
    """A file somewhere, as a DataFile that can be downloaded from there."""
    raw = b"a dataset" * 1000
    path = tmp_path / "source" / "file.bin"
    path.parent.mkdir()
    path.write_bytes(raw)
    return DataFile("set/file.bin", sha256(raw), (path.as_uri(),)), raw


def test_downloads_checks_and_finds_again(source, tmp_path):
    file, raw = source
    counted = []
    path = files.fetch(file, tmp_path / "data", download=True, on_bytes=counted.append)
    assert path == tmp_path / "data" / "set" / "file.bin" and path.read_bytes() == raw
    assert sum(counted) == len(raw)
    assert files.fetch(DataFile(file.path, file.sha256), tmp_path / "data") == path
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_missing_file_says_what_to_do(source, tmp_path):
    file, _ = source
    with pytest.raises(DataError, match=r"file\.bin is missing: run again with --download, or put the file of file:"):
        files.fetch(file, tmp_path)
    with pytest.raises(DataError, match=r"is missing: get it from the shop"):
        files.fetch(DataFile("x", "0", origin="the shop"), tmp_path, download=True)
    assert list(tmp_path.glob("set*")) == []


def test_corrupted_file_is_named_with_both_checksums_and_kept(source, tmp_path):
    file, raw = source
    path = tmp_path / file.path
    path.parent.mkdir()
    path.write_bytes(raw[:-1] + b"?")
    with pytest.raises(DataError, match=rf"file\.bin is not the file it should be.* expected {file.sha256}; remove it"):
        files.fetch(file, tmp_path, download=True)
    assert path.exists()


def test_download_that_is_not_the_file_leaves_nothing(source, tmp_path):
    file, _ = source
    gone = (tmp_path / "gone").as_uri()
    with pytest.raises(
        DataError, match=r"could not be downloaded; file:.*gone.*; file:.*expected one that starts with 00"
    ):
        files.fetch(DataFile(file.path, "00", (gone, *file.urls)), tmp_path / "data", download=True)
    assert list((tmp_path / "data").rglob("*.*")) == []
    # The second source is tried where the first fails.
    assert files.fetch(DataFile(file.path, file.sha256, (gone, *file.urls)), tmp_path / "data", download=True).exists()


def test_checksum_of_which_only_the_start_is_known(source, tmp_path):
    file, _ = source
    known = DataFile(file.path, file.sha256[:8], file.urls)
    path = files.fetch(known, tmp_path / "data", download=True)
    assert files.fetch(known, tmp_path / "data") == path
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match=f"expected one that starts with {file.sha256[:8]}; remove it"):
        files.fetch(known, tmp_path / "data")


def test_folder_is_the_one_given_or_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("FOSI_DATA", raising=False)
    with pytest.raises(DataError, match="give one with --data-dir, or set FOSI_DATA"):
        files.folder(None)
    monkeypatch.setenv("FOSI_DATA", str(tmp_path))
    assert files.folder(None) == tmp_path and files.folder(Path("given")) == Path("given")
    (tmp_path / "a-file").touch()
    with pytest.raises(DataError, match="a-file is a file; give a folder"):
        files.folder(tmp_path / "a-file")


def idx(array):
    header = b"\x00\x00\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


@pytest.mark.parametrize("compressed", [True, False])
def test_idx(compressed, tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(idx(array)) if compressed else idx(array))
    assert np.array_equal(mnist.read_idx(path), array)
    path.write_bytes(idx(array)[:-1])
    with pytest.raises(DataError, match=r"images holds 3919 values, its header says \(5, 28, 28\)"):
        mnist.read_idx(path)
    path.write_bytes(b"\x89PNG....")
    with pytest.raises(DataError, match="is not an idx file of bytes: it starts with 89504e47"):
        mnist.read_idx(path)


def batches():
    rng = np.random.default_rng(1)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return {name: rng.integers(0, 10, (4, cifar10.RECORD), dtype=np.uint8) for name in names}


def check_cifar(found, made):
    assert found.train_images.shape == (20, 32, 32, 3) and found.test_images.shape == (4, 32, 32, 3)
    record = made["data_batch_2"][1]
    assert found.train_labels[5] == record[0]
    assert np.array_equal(found.train_images[5, :, :, 2].ravel(), record[1 + 2048 :])  # the blue plane
    assert found.test_labels.tolist() == made["test_batch"][:, 0].tolist()


def test_cifar_compressed_batches(tmp_path, monkeypatch):
    made = batches()
    (tmp_path / "cifar10").mkdir()
    for name, records in made.items():
        raw = lzma.compress(records.tobytes())
        (tmp_path / "cifar10" / f"{name}.bin.xz").write_bytes(raw)
        monkeypatch.setitem(cifar10.COMPRESSED, name, sha256(raw))
    check_cifar(cifar10.load(tmp_path), made)
    (tmp_path / "cifar10" / "test_batch.bin.xz").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin\.xz is missing"):
        cifar10.load(tmp_path)


def test_cifar_official_archive(tmp_path, monkeypatch):
    made, stream = batches(), io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, records in made.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = records.nbytes
            archive.addfile(member, io.BytesIO(records.tobytes()))
    (tmp_path / "elsewhere.tar.gz").write_bytes(stream.getvalue())
    file = DataFile(cifar10.ARCHIVE.path, sha256(stream.getvalue()), ((tmp_path / "elsewhere.tar.gz").as_uri(),))
    monkeypatch.setattr(cifar10, "ARCHIVE", file)
    check_cifar(cifar10.load(tmp_path / "data", download=True), made)
    with pytest.raises(DataError, match="x holds 10 bytes, not a whole number of records of 3073"):
        cifar10.decode(bytes(10), Path("x"))


def test_text_is_split_in_its_order():
    text = np.arange(200, dtype=np.uint8)
    parts = shakespeare.split(text)
    assert [len(part) for part in parts] == [180, 10, 10]
    assert np.array_equal(np.concatenate(parts), text)


def test_network_is_the_papers_where_it_is_there(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    with pytest.raises(
        DataError, match=r"resnet18-f37072fd\.pth is missing: .*https://download\.pytorch\.org/.*pypi\.org"
    ):
        imagenet.load(tmp_path)
    made = {}
    for number, (name, file) in enumerate(imagenet.FILES.items()):
        stream = io.BytesIO()
        torch.save({"number": torch.tensor(number)}, stream)
        made[name] = stream.getvalue()
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.pth").write_bytes(made[name])
        address = (tmp_path / f"{name}.pth").as_uri()
        monkeypatch.setitem(imagenet.FILES, name, DataFile(file.path, sha256(made[name])[:8], (address,)))
    (tmp_path / imagenet.EFFICIENTNET_LITE0.path).write_bytes(made["efficientnet_lite0"])
    # What is there is used, whether or not another could be had.
    for download in (False, True):
        found = imagenet.load(tmp_path, download)
        assert found.network == "efficientnet_lite0" and found.arrays["number"] == 1
    (tmp_path / imagenet.EFFICIENTNET_LITE0.path).unlink()
    found = imagenet.load(tmp_path, download=True)
    assert found.network == "resnet18" and found.arrays["number"] == 0
    (tmp_path / imagenet.EFFICIENTNET_LITE0.path).write_bytes(made["efficientnet_lite0"])
    assert imagenet.load(tmp_path).network == "resnet18"
