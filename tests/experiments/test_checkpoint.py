"""State dicts of PyTorch read without it: what torch.save wrote, in both formats, and nothing else."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from fosi.experiments.data import checkpoint
from fosi.experiments.data.files import DataError

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "pickle"])


def saved(value, path, zipped):
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def check(path):
    """What is read is what torch reads."""
    ours, theirs = checkpoint.read(path), torch.load(path, weights_only=True)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        wanted = tensor.detach().numpy()
        assert ours[name].dtype == wanted.dtype and ours[name].shape == wanted.shape
        np.testing.assert_array_equal(ours[name], wanted)
    return ours


@FORMATS
def test_every_kind_of_tensor(zipped, tmp_path):
    numbers = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    kinds = (torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    made = OrderedDict(
        whole=numbers,
        turned=numbers.permute(2, 0, 1),
        part=numbers[1:, ::2, 3],  # of the same storage as the others
        repeated=torch.ones(1, 3).expand(4, 3),
        scalar=torch.tensor(7),
        empty=torch.zeros(3, 0),
        parameter=torch.nn.Parameter(numbers * 2),
        **{str(kind): numbers.to(kind) for kind in kinds},
    )
    found = check(saved(made, tmp_path / "made.pth", zipped))
    assert found["part"].tolist() == [[23.0, 33.0], [43.0, 53.0]]
    # Memory of their own, though they shared a storage.
    found["whole"][:] = 0
    assert found["turned"].sum() == found["turned"].size * 29.5


@FORMATS
def test_state_dict_of_a_model(zipped, tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    found = check(saved(model.state_dict(), tmp_path / "model.pth", zipped))
    assert found["1.num_batches_tracked"].dtype == np.int64 and found["0.weight"].shape == (4, 3, 3, 3)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made-by-a-file",)


@FORMATS
def test_code_in_a_file_is_not_run(zipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved({"x": torch.ones(2), "y": Evil()}, tmp_path / "evil.pth", zipped)
    with pytest.raises(
        DataError, match=r"evil\.pth is not a state dict of PyTorch: .* it names posix\.mkdir, which no"
    ):
        checkpoint.read(path)
    assert not (tmp_path / "made-by-a-file").exists()


@FORMATS
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"epoch": 3}, "'epoch' is of type int, not a tensor"),
        ([1, 2], "it holds an object of type list, not a dictionary"),
        ({"x": torch.ones(2, dtype=torch.bfloat16)}, r"it names torch\.BFloat16Storage"),
        (torch.nn.Linear(2, 2), r"it names torch\.nn\.modules\.linear\.Linear"),
    ],
)
def test_anything_but_tensors_is_named(zipped, value, says, tmp_path):
    with pytest.raises(DataError, match=rf"other\.pth is not a state dict of PyTorch: .*{says}"):
        checkpoint.read(saved(value, tmp_path / "other.pth", zipped))


@FORMATS
def test_damaged_file_is_named(zipped, tmp_path):
    path = saved({"x": torch.arange(1000.0)}, tmp_path / "half.pth", zipped)
    whole = path.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"half\.pth is not a state dict of PyTorch: "):
            checkpoint.read(path)


class Storage:
    def __init__(self, count):
        self.count = count


class View:
    """A tensor as a file can claim it to be, of a storage that holds ten numbers."""

    def __init__(self, offset, shape, strides, count=10):
        self.args = Storage(count), offset, shape, strides, False, OrderedDict()

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.args


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", torch.FloatStorage, "0", "cpu", value.count) if isinstance(value, Storage) else None


@pytest.mark.parametrize(
    ("view", "good"),
    [
        (View(1, (3, 3), (3, 1)), True),
        (View(2, (3, 3), (3, 1)), False),  # past the end
        (View(0, (2, 2), (9, 1)), False),
        (View(5, (2,), (-1,)), False),
        (View(-1, (2,), (1,)), False),
        (View(0, (2,), (1,), count=11), False),  # a storage cut short
        (View(0, (2, 2), (1,)), False),
    ],
)
def test_view_outside_its_storage_is_refused(view, good, tmp_path):
    stream, path = io.BytesIO(), tmp_path / "view.pth"
    Pickler(stream, protocol=2).dump({"x": view})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", stream.getvalue())
        archive.writestr("a/byteorder", "little")
        archive.writestr("a/data/0", np.arange(10, dtype=np.float32).tobytes())
    if good:
        assert checkpoint.read(path)["x"].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    else:
        with pytest.raises(DataError, match=r"view\.pth is not a state dict of PyTorch: "):
            checkpoint.read(path)


def test_big_endian_numbers_are_refused(tmp_path):
    path = saved({"x": torch.ones(2)}, tmp_path / "big.pth", True)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in parts.items():
            archive.writestr(name, b"big" if name.endswith("byteorder") else raw)
    with pytest.raises(DataError, match="its numbers are big-endian"):
        checkpoint.read(path)
