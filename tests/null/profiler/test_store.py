"""A file is whole or not there; what does not belong together is not joined; a refusal leaves the store as it was."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from piper_core.arch.presets import preset
from piper_core.errors import ConfigError
from profiler import store
from profiler.form import to_data
from profiler.record import Profile
from profiler.store import add, check_model, find, import_file, load, model_digest, place, profiles, save
from tests.null.profiler.made import LLAMA, MACHINE, bare, profile, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = place(MACHINE, LLAMA.name, model_digest(LLAMA), "float32", tmp_path)
    save(profile(), made)
    return made


def test_found_by_machine_and_model_alone(path: Path, tmp_path: Path) -> None:
    assert find(LLAMA, MACHINE, "float32", tmp_path) == path
    assert find(LLAMA, replace(MACHINE, threads=2), "float32", tmp_path) is None
    assert find(LLAMA, MACHINE, "bfloat16", tmp_path) is None
    assert find(replace(LLAMA, hidden=256), MACHINE, "float32", tmp_path) is None
    assert find(replace(LLAMA, name="other"), MACHINE, "float32", tmp_path) is None
    assert profiles(tmp_path) == [path]
    assert to_data(load(path)) == to_data(profile())


def test_resuming_adds_to_what_is_there(path: Path) -> None:
    joined = add(profile(micro_batch=(4,)), path)
    assert to_data(load(path)) == to_data(joined)
    assert len(joined.sites) == len(profile(micro_batch=(1, 2, 4)).sites)


@pytest.mark.parametrize("field", ["device", "torch", "driver", "threads", "count"])
def test_unlike_machines_are_not_joined(path: Path, field: str) -> None:
    other = replace(MACHINE, **{field: 7 if field in ("threads", "count") else "other"})
    refused(path, profile(machine=other), f"another machine: {field}")


def test_other_models_and_dtypes_are_not_joined(path: Path) -> None:
    refused(path, profile(preset("tiny-moe")), "of model tiny-llama, not of tiny-moe")
    refused(path, profile(replace(LLAMA, hidden=256)), "by another definition")
    refused(path, replace(profile(), dtype="bfloat16"), "of float32, not of bfloat16")
    with pytest.raises(ConfigError, match="take one with piper-profile --model tiny-moe"):
        check_model(profile(), "tiny-moe", "x", "profile")


def refused(path: Path, other: Profile, words: str) -> None:
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=words):
        add(other, path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "not whole JSON"),
        (lambda text: "", "not whole JSON"),
        (lambda text: "[" * 100_000, "not whole JSON"),
        (lambda text: "[1]", "not a profile"),
        (lambda text: text.replace('"version":1', '"version":2'), "version 2, and this program reads version 1"),
        (lambda text: text.replace('"version":1', '"version":"1"'), "version 1"),
        (lambda text: text.replace('"updates":', '"upd":'), "updates is missing"),
        (lambda text: text.replace('"region":"mlp"', '"region":"nose"', 1), r"region must be .* found 'nose'"),
        (lambda text: text.replace('"ranks":2', '"ranks":3', 1), "check sum"),
        (lambda text: text.replace("float32", "float31"), "dtype must be float32 or "),
    ],
)
def test_what_is_no_profile_is_refused(path: Path, change: object, words: str) -> None:
    text = path.read_text()
    changed = change(text)  # type: ignore[operator]  # a lambda
    assert changed != text
    path.write_text(changed)
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        add(profile(), path)
    assert path.read_text() == changed


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="piper-profile show lists"):
        load(tmp_path / "no.profile.json")
    with pytest.raises(ConfigError, match="No such file"):
        import_file(tmp_path / "no.profile.json", tmp_path)


def test_a_write_that_dies_leaves_what_was_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "replace", fail)
    with pytest.raises(ConfigError, match="No space left"):
        add(profile(micro_batch=(4,)), path)
    monkeypatch.setattr(store.os, "replace", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        add(profile(micro_batch=(4,)), path)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir() if each.suffix == ".tmp"] == []


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        add(profile(), tmp_path / "file" / "a.profile.json")


def test_writers_at_once_lose_nothing(path: Path) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=_write, args=(path, n)) for n in range(6)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert all(each.exitcode == 0 for each in workers)
    assert sorted(each.strategy for each in load(path).runs) == sorted(f"{n}.{i}" for n in range(6) for i in range(3))


def _write(path: Path, n: int) -> None:
    for i in range(3):
        add(bare(runs=(run(f"{n}.{i}", 1.0, 1.0, i),)), path)
    os._exit(0)


def test_import_brings_a_file_to_its_place(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    found = import_file(path, other)
    assert found.relative_to(other) == path.relative_to(tmp_path)
    assert json.loads(found.read_text())["format"] == "piper-profile"
    import_file(path, other)
    assert to_data(load(found)) == to_data(load(path))
