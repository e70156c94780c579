"""TensorBoard's event files, read back by a decoder that shares nothing with the writer."""

import math
import socket
import struct
import time

import numpy as np
import pytest

from fosi.experiments import tensorboard
from fosi.experiments.tensorboard import EventWriter, crc32c


def bitwise_crc32c(data):
    """By long division: the message as a polynomial with its bits reversed, modulo Castagnoli's."""
    remainder = 0xFFFFFFFF
    for bit in (byte >> i & 1 for byte in data for i in range(8)):
        top = remainder >> 31
        remainder = remainder << 1 & 0xFFFFFFFF
        if top != bit:
            remainder ^= 0x1EDC6F41
    return int(f"{remainder ^ 0xFFFFFFFF:032b}"[::-1], 2)


def masked(data):
    crc = bitwise_crc32c(data)
    return ((crc // 2**15 + crc % 2**15 * 2**17) + 0xA282EAD8) % 2**32


def records(raw):
    """What the records of a file hold; every checksum must be right."""
    found = []
    while raw:
        length, crc = struct.unpack("<QI", raw[:12])
        assert crc == masked(raw[:8])
        data, (crc,) = raw[12 : 12 + length], struct.unpack("<I", raw[12 + length : 16 + length])
        assert len(data) == length and crc == masked(data)
        found.append(data)
        raw = raw[16 + length :]
    return found


def fields(message):
    """A protocol buffer as a list of (number, kind, value)."""
    found, at = [], 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        number, kind = key // 8, key % 8
        if kind == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}[kind] if kind != 2 else varint()
            value, at = message[at : at + size], at + size
            assert len(value) == size
        found.append((number, kind, value))
    return found


def events(path):
    """(step, wall time, {tag: value}) of each event after the first, which must be the version."""
    first, *others = records(path.read_bytes())
    head = {number: (kind, value) for number, kind, value in fields(first)}
    assert head.keys() == {1, 3} and head[3] == (2, b"brain.Event:2") and head[1][0] == 1
    found = []
    for record in others:
        parts = {number: (kind, value) for number, kind, value in fields(record)}
        assert parts.keys() == {1, 2, 5} and [parts[n][0] for n in (1, 2, 5)] == [1, 0, 2]
        values = {}
        for number, kind, value in fields(parts[5][1]):
            assert (number, kind) == (1, 2)
            (tag_at, tag_kind, tag), (value_at, value_kind, number_) = fields(value)
            assert (tag_at, tag_kind, value_at, value_kind) == (1, 2, 2, 5)
            values[tag.decode()] = struct.unpack("<f", number_)[0]
        found.append((parts[2][1], struct.unpack("<d", parts[1][1])[0], values))
    return found


def test_checksum():
    assert crc32c(b"123456789") == bitwise_crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 300):
        data = rng.bytes(size)
        assert crc32c(data) == bitwise_crc32c(data)


def test_what_was_written_can_be_read(tmp_path):
    before = time.time()
    with EventWriter(tmp_path / "deep" / "run") as writer:
        writer.scalars(0, {"train/loss": 2.5})
        writer.scalars(127, {"train/loss": 0.1, "α": -1e-3}, wall_time=1234.5)
        writer.scalars(128, {})
        writer.scalars(2**40, {"t" * 200: 3.0})
    first, second, empty, last = events(writer.path)
    assert first[0] == 0 and before <= first[1] <= time.time() and first[2] == {"train/loss": 2.5}
    assert second == (127, 1234.5, {"train/loss": float(np.float32(0.1)), "α": float(np.float32(-1e-3))})
    assert empty[0] == 128 and empty[2] == {}
    assert last[0] == 2**40 and last[2] == {"t" * 200: 3.0}
    with pytest.raises(ValueError, match="closed file"):
        writer.scalars(1, {"x": 1.0})


def test_what_is_no_number_is_written_as_it_is(tmp_path):
    with EventWriter(tmp_path) as writer:
        writer.scalars(1, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "large": 1e300, "numpy": np.float64(2)})
    ((_, _, values),) = events(writer.path)
    assert math.isnan(values.pop("nan"))
    assert values == {"inf": math.inf, "-inf": -math.inf, "large": math.inf, "numpy": 2.0}


def test_it_can_be_read_after_each_call(tmp_path):
    writer = EventWriter(tmp_path)
    assert events(writer.path) == []
    writer.scalars(1, {"x": 1.0})
    assert [step for step, _, _ in events(writer.path)] == [1]
    writer.close()


def test_opened_again_it_goes_on_in_a_file_that_comes_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard.time, "time", lambda: 1_700_000_000.5)
    written = []
    for step in range(12):  # within the same second
        with EventWriter(tmp_path) as writer:
            writer.scalars(step, {"x": 1.0})
        written.append(writer.path)
    monkeypatch.setattr(tensorboard.time, "time", lambda: 1_700_000_001.5)
    with EventWriter(tmp_path) as writer:
        writer.scalars(12, {"x": 1.0})
    assert sorted(tmp_path.iterdir()) == [*written, writer.path]
    assert [events(path)[0][0] for path in [*written, writer.path]] == list(range(13))


def test_name_is_one_that_tensorboard_looks_for_and_without_the_machine(tmp_path):
    with EventWriter(tmp_path) as writer:
        pass
    start, kind, seconds, number, end = writer.path.name.removeprefix("events.").split(".")
    assert (start, kind, end) == ("out", "tfevents", "fosi")
    assert abs(int(seconds) - time.time()) < 60 and int(number) == 0
    assert socket.gethostname() not in writer.path.name


def test_step_below_zero_is_refused(tmp_path):
    with EventWriter(tmp_path) as writer, pytest.raises(ValueError, match="step is -1; give 0 or more"):
        writer.scalars(-1, {"x": 1.0})
