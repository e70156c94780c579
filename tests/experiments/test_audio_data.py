"""Sound datasets, read from files made here: a hundred tones and noises instead of clips."""

import hashlib
import http.client
import io
import sys
import tarfile
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fosi import cli
from fosi.experiments.data import audio, audioset, esc50, files, mel
from fosi.experiments.data.files import DataError, DataFile

soundfile = pytest.importorskip("soundfile")


def tone(frequency, rate, seconds=5.0):
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(rate * seconds)) / rate)


def wav(samples, rate, width=2):
    """A WAV file of 1 or more channels, by the standard library."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        scaled = np.round(samples * (2 ** (8 * width - 1) - 1))
        file.writeframes(scaled.astype({2: "<i2", 4: "<i4"}[width]).tobytes())
    return stream.getvalue()


def encoded(samples, rate, form):
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=form)
    return stream.getvalue()


def test_every_way_to_write_a_sound_reads_the_same():
    wanted = tone(440, 16_000)
    both = np.stack([wanted + 0.25, wanted - 0.25], 1)  # the mean of the channels is the tone
    for raw, close in [
        (wav(wanted, 16_000), 1e-4),
        (wav(both, 16_000), 1e-4),
        (wav(wanted, 16_000, width=4), 1e-6),
        (encoded(wanted, 16_000, "FLAC"), 1e-4),
        (encoded(wanted, 16_000, "OGG"), 0.05),
    ]:
        found = audio.decode(raw, "a sound")
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=close)


@pytest.mark.parametrize("rate", [44_100, 48_000, 8_000])
def test_resampled_tone_is_the_tone(rate):
    found = audio.decode(wav(tone(440, rate), rate), "a sound")
    assert found.shape == (80_000,) and found.dtype == np.float32
    np.testing.assert_allclose(found[1000:-1000], tone(440, 16_000)[1000:-1000], atol=5e-3)


def test_what_16_khz_cannot_hold_is_gone_and_not_folded():
    found = audio.decode(wav(tone(12_000, 44_100), 44_100), "a sound")
    assert np.abs(found[1000:-1000]).max() < 0.01


def test_undecodable_file_is_named():
    with pytest.raises(DataError, match=r"1-2-A-3\.ogg cannot be decoded: .*[Ff]ormat not recognised"):
        audio.decode(b"nothing like a sound" * 10, "1-2-A-3.ogg")
    whole = wav(tone(440, 16_000), 16_000)
    assert len(audio.decode(whole[:-1001], "cut")) == 80_000 - 501  # within a sample


def test_without_soundfile_wav_is_read_and_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(audio.decode(wav(tone(440, 16_000), 16_000), "a.wav")) == 80_000
    with pytest.raises(
        ModuleNotFoundError, match=r'a\.ogg .* without soundfile.*pip install "fosi\[tasks\]"'
    ) as caught:
        audio.decode(encoded(tone(440, 16_000), 16_000, "OGG"), "a.ogg")
    assert caught.value.name == "soundfile" and cli._OPTIONAL["soundfile"] == cli._OPTIONAL["flax"] == "tasks"


# Ten clips, two in each fold, each a tone by which it can be told.
NAMES = [f"{fold}-{100 + take}-A-{5 * take + fold}" for take in range(2) for fold in range(1, 6)]
FREQUENCIES = {name: 300.0 * (index + 1) for index, name in enumerate(NAMES)}


def table(names=NAMES):
    rows = [f"{n}.wav,{n.split('-')[0]},{n.split('-')[-1]},dog,True,{n.split('-')[1]},A" for n in names]
    return "\n".join(["filename,fold,target,category,esc10,src_file,take", *rows]).encode()


def packed(sounds):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        directory = tarfile.TarInfo("esc50-16k")
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for name, raw in sounds.items():
            member = tarfile.TarInfo(f"esc50-16k/{name}.ogg")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))
    return stream.getvalue()


def ogg_clips(seconds=5.0):
    # In another order than the table's.
    return {name: encoded(tone(FREQUENCIES[name], 16_000, seconds), 16_000, "OGG") for name in sorted(NAMES)}


def place(folder, monkeypatch, sounds, rows=None):
    """Puts the archive and the table into the folder, as the files that are expected."""
    (folder / "audio").mkdir(exist_ok=True)
    for constant, raw in (("COMPRESSED", packed(sounds)), ("TABLE", rows or table())):
        file = getattr(esc50, constant)
        (folder / file.path).write_bytes(raw)
        monkeypatch.setattr(esc50, constant, DataFile(file.path, hashlib.sha256(raw).hexdigest(), origin="x"))


def released(sounds, rows=None):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("ESC-50-master/README.md", "not a sound")
        archive.writestr("ESC-50-master/meta/esc50.csv", rows or table())
        for name, raw in sounds.items():
            archive.writestr(f"ESC-50-master/audio/{name}.wav", raw)
    return stream.getvalue()


def wav_clips():
    return {name: wav(tone(FREQUENCIES[name], 44_100), 44_100) for name in sorted(NAMES)}


@pytest.fixture
def ten(monkeypatch):
    monkeypatch.setattr(esc50, "CLIPS", 10)


def check_clips(found):
    assert found.pieces.shape == (50, 96, 64) and found.pieces.dtype == np.float32
    assert found.clips.tolist() == [clip for clip in range(10) for _ in range(5)]
    assert found.labels.tolist() == [int(NAMES[clip].split("-")[-1]) for clip in found.clips]
    assert found.folds.tolist() == [int(NAMES[clip].split("-")[0]) for clip in found.clips]
    # Each clip's tone is in its own pieces.
    for piece, clip in zip(found.pieces, found.clips, strict=True):
        nearest = mel.filters()[:, round(FREQUENCIES[NAMES[clip]] / 31.25)].argmax()
        assert abs(int(piece[48].argmax()) - int(nearest)) <= 1
    train, validation = found.split()
    assert len(train.pieces) == 40 and set(train.folds.tolist()) == {1, 2, 3, 4}
    assert len(validation.pieces) == 10 and set(validation.folds.tolist()) == {5}
    assert not set(train.clips.tolist()) & set(validation.clips.tolist())


def test_esc50_compressed(tmp_path, monkeypatch, ten):
    place(tmp_path, monkeypatch, ogg_clips())
    check_clips(esc50.load(tmp_path))


def test_esc50_official_release_is_downloaded_and_found_again(tmp_path, monkeypatch, ten):
    source = tmp_path / "master.zip"
    source.write_bytes(released(wav_clips()))
    file = DataFile(esc50.OFFICIAL.path, None, (source.as_uri(),), check=esc50.OFFICIAL.check)
    monkeypatch.setattr(esc50, "OFFICIAL", file)
    with pytest.raises(DataError, match=r"ESC-50-master\.zip is missing: run again with --download"):
        esc50.load(tmp_path / "data")
    check_clips(esc50.load(tmp_path / "data", download=True))
    source.unlink()
    assert esc50.load(tmp_path / "data").pieces.shape == (50, 96, 64)


def test_esc50_official_release_that_is_not_whole_is_refused(tmp_path, monkeypatch, ten):
    clips = wav_clips()
    del clips[NAMES[3]]
    cases = [
        (released(clips), rf"it lacks 1 clips, among them ESC-50-master/audio/{NAMES[3]}\.wav"),
        (released(clips)[:-2000], "it does not hold the release: File is not a zip file"),
        (released(clips, table(NAMES[:9])), "names 9 clips, expected 10"),
        (released(clips, b"a,b\n1,2\n"), r"is not esc50\.csv: KeyError"),
        (b"<html>", "it does not hold the release"),
    ]
    path = tmp_path / esc50.OFFICIAL.path
    path.parent.mkdir()
    for raw, message in cases:
        path.write_bytes(raw)
        with pytest.raises(DataError, match=f"is not the file it should be: .*{message}.*; remove it and run again"):
            esc50.load(tmp_path)
    # As a download it is not kept.
    path.rename(tmp_path / "elsewhere")
    bad = DataFile(esc50.OFFICIAL.path, None, ((tmp_path / "elsewhere").as_uri(),), check=esc50.OFFICIAL.check)
    with pytest.raises(DataError, match=r"could not be downloaded; file:.*it does not hold the release"):
        files.fetch(bad, tmp_path, download=True)
    assert list(path.parent.iterdir()) == []


def test_esc50_release_damaged_within_a_clip_is_refused(tmp_path, ten):
    raw = bytearray(released(wav_clips()))
    raw[len(raw) // 2] ^= 0xFF
    path = tmp_path / esc50.OFFICIAL.path
    path.parent.mkdir()
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"is damaged: Bad CRC-32 .*; remove it and download it again"):
        esc50.load(tmp_path)


def test_esc50_clips_that_do_not_fit_the_table_are_named(tmp_path, monkeypatch, ten):
    clips = ogg_clips()
    place(tmp_path, monkeypatch, {name: clips[name] for name in NAMES[:-1]})
    with pytest.raises(DataError, match=rf"lacks 1 of 10 clips, among them {NAMES[-1]}"):
        esc50.load(tmp_path)
    place(tmp_path, monkeypatch, {**clips, "6-1-A-1": clips[NAMES[0]]})
    with pytest.raises(DataError, match=r"holds esc50-16k/6-1-A-1\.ogg, which is not in the table"):
        esc50.load(tmp_path)
    place(tmp_path, monkeypatch, {**clips, NAMES[2]: encoded(tone(300, 16_000, 4.9), 16_000, "OGG")})
    with pytest.raises(DataError, match=rf"{NAMES[2]}\.ogg in .* has 78400 samples at 16 kHz, expected 80000"):
        esc50.load(tmp_path)
    place(tmp_path, monkeypatch, clips)
    (tmp_path / esc50.TABLE.path).unlink()
    with pytest.raises(DataError, match=r"esc50\.csv is missing"):
        esc50.load(tmp_path)


def test_esc50_archive_that_ends_early_is_refused(tmp_path):
    path = tmp_path / "clips.tar.xz"
    path.write_bytes(packed(ogg_clips())[:-5000])
    with pytest.raises(DataError, match=r"clips\.tar\.xz cannot be unpacked"):
        list(esc50._compressed(path))


def test_download_cut_off_is_reported(tmp_path, monkeypatch):
    class Cut(io.BytesIO):
        def read(self, size=-1):
            raise http.client.IncompleteRead(b"", 5)

    monkeypatch.setattr(files.urllib.request, "urlopen", lambda url, timeout: Cut())
    with pytest.raises(DataError, match="could not be downloaded; https://x: IncompleteRead"):
        files.fetch(DataFile("file", None, ("https://x",)), tmp_path, download=True)


LABELS = ["/m/09x0r", "/m/05zppz", "/t/dd00003", "/m/0k5j"]


def audioset_folder(where):
    """Two parts of four clips: one is missing, one is empty, and two are there, of ten seconds or more and of 2.98."""
    where.mkdir()
    lines = [f'{index},{mid},"A name, with a comma"' for index, mid in enumerate(LABELS)]
    (where / "class_labels_indices.csv").write_text("\n".join(["index,mid,display_name", *lines]) + "\n")
    for part in ("balanced_train", "eval"):
        (where / f"{part}_segments.csv").write_text(
            "# Segments csv created Sun Mar  5 10:54:25 2017\n"
            "# num_ytids=4, num_segs=4, num_unique_labels=4, num_positive_labels=6\n"
            "# YTID, start_seconds, end_seconds, positive_labels\n"
            '--4gqARaEJE, 0.000, 10.000, "/t/dd00003,/m/09x0r"\n'
            '_gone, 30.000, 40.000, "/m/0k5j"\n'
            '--broken, 30.000, 40.000, "/m/0k5j"\n'
            'short, 30.000, 32.980, "/m/05zppz"\n'
        )
        (where / part).mkdir()
        (where / part / "--broken.wav").touch()
        (where / part / "notes.txt").touch()
    train, evaluation = where / "balanced_train", where / "eval"
    (train / "--4gqARaEJE.wav").write_bytes(wav(tone(440, 16_000, 11.5), 16_000))
    (train / "short.flac").write_bytes(encoded(tone(2000, 44_100, 2.98), 44_100, "FLAC"))
    (evaluation / "--4gqARaEJE.ogg").write_bytes(encoded(tone(440, 16_000, 10), 16_000, "OGG"))
    (evaluation / "short.WAV").write_bytes(wav(tone(2000, 32_000, 2.98), 32_000))


def test_audioset(tmp_path):
    audioset_folder(tmp_path / "audioset")
    found = audioset.load(tmp_path)
    for part in found:
        assert (part.missing, part.unreadable) == (1, 1)
        assert part.pieces.shape == (13, 96, 64) and part.pieces.dtype == np.float32
        assert part.clips.tolist() == [0] * 10 + [3] * 3
        assert part.labels[0].tolist() == [True, False, True, False]
        assert part.labels[12].tolist() == [False, True, False, False]
        assert part.pieces[9].mean(0).argmax() < part.pieces[10].mean(0).argmax()


def test_audioset_errors_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"class_labels_indices\.csv is missing: get it from https://research\.google"):
        audioset.load(tmp_path)
    where = tmp_path / "audioset"
    audioset_folder(where)
    table = where / "eval_segments.csv"
    text = table.read_text()
    table.write_text(text.replace("/m/05zppz", "/m/unknown"))
    with pytest.raises(DataError, match=r"'short'.*has the label '/m/unknown', which class_labels_indices\.csv lacks"):
        audioset.load(tmp_path)
    table.write_text("short, 30.0\n")
    with pytest.raises(DataError, match="is not one; rows are YTID, start, end, labels"):
        audioset.load(tmp_path)
    table.write_text(text)
    for path in where.glob("eval/*[ET].*"):
        path.unlink()
    (where / "eval" / "short.WAV").unlink(missing_ok=True)
    with pytest.raises(DataError, match=r"none of the 1 clips in .*eval can be decoded and lasts a second"):
        audioset.load(tmp_path)
    (where / "eval" / "--broken.wav").unlink()
    with pytest.raises(
        DataError, match=r"eval holds none of the 4 clips of eval_segments\.csv; put them there as YTID"
    ):
        audioset.load(tmp_path)
    (where / "class_labels_indices.csv").write_text("index,mid,display_name\n1,/m/09x0r,Speech\n")
    with pytest.raises(DataError, match="does not list labels as index, mid, display_name from 0 on"):
        audioset.load(tmp_path)


def test_audioset_needs_soundfile_and_does_not_skip_for_want_of_it(tmp_path, monkeypatch):
    audioset_folder(tmp_path / "audioset")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ModuleNotFoundError, match="soundfile"):
        audioset.load(tmp_path)


def test_official_files_are_where_the_readme_says():
    assert {Path(f.path).parent.name for f in (esc50.OFFICIAL, esc50.COMPRESSED, esc50.TABLE)} == {"audio"}
    assert esc50.OFFICIAL.sha256 is None and esc50.CLIPS == 2000
