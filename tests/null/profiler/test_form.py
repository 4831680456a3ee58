"""What is in a profile is checked where they are read: by name, with what was found and what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper_core.errors import ConfigError
from profiler import store
from profiler.cli import main
from profiler.form import from_data, to_data
from profiler.record import Meeting
from profiler.store import load, save
from search.cli import main as search
from tests.null.profiler.made import around, bare, profile, run
from tests.null.profiler.test_cli import PREDICT

HUGE = 10**400
CASES: list[tuple[list[str | int], list[object], str]] = [
    (["chunks", "mlpF11", "times_s", 0], [HUGE, 1e300, 86401, float("nan"), float("inf"), 0, 0.0, 1e-300, -1, True,
                                          None, "1", [1]], "a number from 1e-09 to 86400"),
    (["chunks", "mlpF11", "times_s"], [[], {}, 1.0], "a list of numbers, one at least"),
    (["chunks", "mlpF11", "peak_bytes"], [-1, 1.5, HUGE, float("inf"), None], "an integer from 0 to"),
    (["chunks", "mlpF11", "saved_bytes"], [-1, float("nan")], "an integer from 0 to"),
    (["chunks", "mlpF11", "interrupted"], [-1, HUGE, "0"], "an integer from 0 to"),
    (["chunks", "mlpF11", "failed"], [None, 1], "printable text"),
    (["chunks", "mlpF11"], [None, []], "an object"),
    *(
        (["sites", 3, name], [0, -1, 10**30, 1.0, float("nan"), None, True], "an integer from 1 to")
        for name in ("tensor", "expert", "context", "micro_batch", "seq_len")
    ),
    (["sites", 3, "sequence"], [0, None, "yes"], "true or false"),
    (["sites", 3, "method"], [None, "nose", 1, []], "ring or all_to_all"),
    (["sites", 3, "phase"], ["NONE", 0, None], "F or B or BI or BW or R"),
    (["sites", 3, "region"], ["nose", None], "embed or "),
    (["sites", 3, "policy"], ["nose", None], "none or "),
    (["sites", 3], [None, 1], "an object"),
    (["sites"], [None, {}], "a list"),
    (["transfers", 0, "times_s", 1], [0, 1e308, HUGE, float("nan")], "a number from 1e-09 to 86400"),
    (["transfers", 0, "bytes"], [0, -1, float("inf"), HUGE], "an integer from 1 to"),
    (["transfers", 0, "ranks"], [1, 0, -2, 10**30], "an integer from 2 to"),
    (["transfers", 0, "nodes"], [0, 10**30], "an integer from 1 to"),
    (["transfers", 0, "kind"], ["none", "nose", 3], "all_reduce or "),
    (["updates", 0, "numel"], [0, -1, HUGE], "an integer from 1 to"),
    (["updates", 0, "times_s", 0], [0, 1e300], "a number from 1e-09 to 86400"),
    (["overlaps", 0, "times_s", 0], [0, -1, 1e300, float("nan")], "a number from 1e-06 to 1000000"),
    (["meetings", 0, "compute_s"], [0, -1, 1e300, None], "a number from 1e-09 to 86400"),
    (["meetings", 0, "times_s", 0], [0, 1e300, float("nan")], "a number from 1e-06 to 1000000"),
    (["meetings"], [None, {}], "a list"),
    (["dispatch", "times_s", 0], [0, 1e300, float("nan")], "a number from 1e-09 to 86400"),
    (["machine", "count"], [0, -1, 1.5, 10**30, None], "an integer from 1 to"),
    (["machine", "threads"], [0, -1, 10**30, None], "an integer from 1 to"),
    (["machine", "memory_bytes"], [-5, HUGE, float("inf")], "an integer from 0 to"),
    (["machine", "kind"], ["tpu", None], "cpu or cuda"),
    (["machine", "device"], [None, 1], "printable text"),
    (["runs", 0, "predicted_s"], [0, -1, 1e-300, float("nan"), HUGE, None], "a number from 1e-09 to 86400"),
    (["runs", 0, "times_s", 0], [0, 1e300, float("nan")], "a number from 1e-09 to 86400"),
    (["runs", 0, "features", "exposed"], [float("nan"), -1, 1e300, None], "a number from 0 to 2"),
    (["runs", 0, "strategy"], [None, "a\nb", "\x1b[31m"], "printable text"),
    (["runs", 0, "when"], [None, 1], "printable text"),
    (["conditions", 0, "load"], [-1, float("nan"), "0"], "a number from 0 to"),
    (["conditions", 0, "clock_mhz"], [-1, float("inf")], "a number from 0 to"),
    (["dtype"], ["float31", None, []], "float32 or "),
    (["model", "name"], [None], "printable text"),
]  # fmt: skip
EACH = [(where, value, words) for where, values, words in CASES for value in values]


TEXT = json.dumps(
    to_data(profile().merged(bare(runs=(run("a", 1, 1, exposed=0.2),), meetings=(Meeting(1e-3, around(1.2)),))))
)


def data() -> dict[str, Any]:
    """Return a profile with one of everything."""
    found: dict[str, Any] = json.loads(TEXT)
    return found


def changed(where: list[str | int], value: object) -> dict[str, Any]:
    """Return the data with one entry replaced."""
    made = data()
    at: Any = made
    for step in where[:-1]:
        at = at[step]
    at[where[-1]]  # there is such an entry
    at[where[-1]] = value
    return made


def kept(made: dict[str, Any], path: Path) -> Path:
    """Write data as a profile whose check sum is right."""
    whole = {"format": store.FORMAT, "version": store.VERSION, **made}
    path.write_text(json.dumps(whole | {"sum": store._sum(whole)}))
    return path


def called(where: list[str | int]) -> str:
    """Return how a field is called."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)
    return text[1:]


def test_the_data_itself_is_read(tmp_path: Path) -> None:
    assert to_data(load(kept(data(), tmp_path / "a.profile.json"))) == data()


@pytest.mark.parametrize(("where", "value", "words"), EACH, ids=lambda each: str(each)[:40])
def test_what_is_out_of_range_is_named(where: list[str | int], value: object, words: str, tmp_path: Path) -> None:
    path = kept(changed(where, value), tmp_path / "a.profile.json")
    with pytest.raises(ConfigError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"profile {path}: {called(where)} must be {words}")
    assert f"found {str(value)[:40]!r}; take it again" in text
    assert "\n" not in text
    assert len(text) < 300 + len(str(path))


@pytest.mark.parametrize("where", [["machine", "threads"], ["sites", 3, "tensor"], ["runs", 0, "digest"], ["updates"]])
def test_what_is_missing_is_named(where: list[str | int]) -> None:
    made = changed(where, None)
    at: Any = made
    for step in where[:-1]:
        at = at[step]
    del at[where[-1]]
    with pytest.raises(ConfigError) as caught:
        from_data(made)
    assert str(caught.value) == f"profile: {called(where)} is missing; take it again"


def test_machines_and_conditions_have_no_other_fields() -> None:
    for name in ("machine", "conditions"):
        made = data()
        (made[name] if name == "machine" else made[name][0])["nose"] = 1
        with pytest.raises(ConfigError, match=r"nose is no field of it"):
            from_data(made)


@pytest.mark.parametrize(("field", "value"), [("times_s", None), ("failed", "out of memory")])
def test_a_chunk_was_timed_or_failed(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"profile: chunks\.mlpF11 has either times_s or a reason"):
        from_data(changed(["chunks", "mlpF11", field], value))


def test_a_site_is_of_a_chunk_that_is_there() -> None:
    with pytest.raises(ConfigError, match=r"profile: site embed F b1 s128 is of chunk 'zz', which it lacks"):
        from_data(changed(["sites", 0, "chunk"], "zz"))


def test_nothing_is_written_that_would_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "a.profile.json"
    save(profile(), path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"to be written to .*runs\[0\]\.predicted_s must be a number from 1e-09"):
        save(bare(runs=(run("a", 1.0, 0.0),)), path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", ["predict", "show", "compare", "import", "history"])
def test_every_reader_refuses_in_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(kept(changed(["chunks", "mlpF11", "times_s", 0], HUGE), tmp_path / "a.profile.json"))
    words = {
        "predict": [*PREDICT, "--profile", path],
        "compare": ["compare", path, path], "import": ["import", path, "--store", str(tmp_path / "store")],
    }.get(command, [command, path])  # fmt: skip
    status = (search if command in ("predict", "history") else main)(words)
    told = capsys.readouterr()
    assert (status, told.out, told.err.count("\n")) == (2, "", 1)
    assert f"error: profile {path}: chunks.mlpF11.times_s[0] must be a number from 1e-09 to 86400" in told.err


def test_older_files_say_nothing_of_meetings() -> None:
    older = {name: value for name, value in data().items() if name != "meetings"}
    assert from_data(older).meetings == ()
    (again,) = from_data(data()).meetings
    assert (again.compute_s, again.factors.median_s) == (1e-3, pytest.approx(1.2))
