"""trace_model, its cache, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor

from piper_core.arch import Architecture
from piper_core.errors import ConfigError
from piper_core.frontend import cache as caching
from piper_core.frontend.cache import Cache
from piper_core.frontend.load import load_function
from piper_core.frontend.table import Trace
from piper_core.frontend.trace import trace_model
from search.cli import main

TINY = Architecture("tiny", 2, 16, 32, 2, 1, 8, 64)
MODEL = """
import torch
from torch import nn
{extra}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear({width}, {width})
    def forward(self, x):
        return self.linear(x).sum()

def make():
    return Model(), torch.randn(2, {width})
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path / "cache"))
    return Cache.default()


def write(path: Path, *, width: int = 4, extra: str = "") -> str:
    path.write_text(MODEL.format(width=width, extra=extra))
    return f"{path}:make"


def entries(cache: Cache) -> list[Path]:
    assert cache.folder is not None
    return sorted(cache.folder.glob("*.json"))


def refuse_to_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr("piper_core.frontend.trace._trace_architecture", never)
    monkeypatch.setattr("piper_core.frontend.trace._trace_function", never)


def test_the_second_answer_comes_from_the_cache(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trace_model(TINY, seq_len=16)
    refuse_to_trace(monkeypatch)
    assert trace_model(TINY, seq_len=16) == first
    assert trace_model(TINY, seq_len=16, micro_batch=3) == first.of(3)
    assert len(entries(cache)) == 1


@pytest.mark.parametrize(
    "options",
    [{"seq_len": 32}, {"seq_len": 16, "dtype": "float32"}, {"seq_len": 16, "kernels": "fused"}],
)
def test_other_options_are_other_entries(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    numbers = iter((1, 2))
    monkeypatch.setattr("piper_core.frontend.trace._trace_architecture", lambda *_: small(next(numbers)))
    assert trace_model(TINY, seq_len=16).layers == 1
    assert trace_model(TINY, **options).layers == 2
    assert len(entries(cache)) == 2


def small(number: int) -> Trace:
    return Trace("small", number, 16, 1, True, 2, (), (), ())


@pytest.mark.parametrize("what", ["torch", "piper-search", "source", "python"])
def test_another_version_traces_again(cache: Cache, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    assert cache.get({"a": 1}, lambda: small(1)) == small(1)
    assert cache.get({"a": 1}, lambda: small(2)) == small(1)
    versions = caching._versions()
    monkeypatch.setattr(caching, "_versions", lambda: versions | {what: "another"})
    assert cache.get({"a": 1}, lambda: small(3)) == small(3)


def test_our_own_text_is_a_version(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = caching._source()
    (tmp_path / "arch").mkdir()
    (tmp_path / "arch" / "one.py").write_text("")
    monkeypatch.setattr(caching, "_ROOT", tmp_path)
    assert caching._source() != before


@pytest.mark.parametrize("spoil", ["", "{", '{"key": 1}', "[]", "null"])
def test_a_spoiled_entry_is_made_again(cache: Cache, spoil: str) -> None:
    cache.get({"a": 1}, lambda: small(1))
    (entry,) = entries(cache)
    whole = entry.read_text()
    entry.write_text(spoil)
    assert cache.get({"a": 1}, lambda: small(1)) == small(1)
    assert entry.read_text() == whole


def test_a_changed_file_is_traced_again(cache: Cache, tmp_path: Path) -> None:
    name = write(tmp_path / "mine.py")
    before = trace_model(name)
    write(tmp_path / "mine.py", width=8)
    after = trace_model(name)
    assert (before.model().parameters, after.model().parameters) == (20, 72)


@pytest.mark.parametrize("used", ["import", "open"])
def test_a_changed_file_beside_it_is_seen(cache: Cache, tmp_path: Path, used: str) -> None:
    extra = (
        "from sizes_beside import WIDTH"
        if used == "import"
        else f"from pathlib import Path\nWIDTH = int(Path({str(tmp_path / 'w')!r}).read_text())"
    )
    other = tmp_path / ("sizes_beside.py" if used == "import" else "w")

    def say(width: int) -> None:
        other.write_text(f"WIDTH = {width}" if used == "import" else str(width))

    say(4)
    path = tmp_path / "mine.py"
    path.write_text(MODEL.replace("{width}", "WIDTH").replace("{extra}", extra))
    assert trace_model(f"{path}:make").model().parameters == 20
    say(12)
    sys.modules.pop("sizes_beside", None)
    assert trace_model(f"{path}:make").model().parameters == 156


def test_an_unchanged_file_is_not_run_again(cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write(tmp_path / "mine.py")
    first = trace_model(name)
    refuse_to_trace(monkeypatch)
    assert trace_model(name) == first


def test_no_folder_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPER_CACHE", "")
    assert Cache.default() == Cache(None)
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").write_text("not a folder")
    assert trace_model(TINY, seq_len=16).layers == 2


def test_a_warm_command_imports_no_torch(cache: Cache) -> None:
    command = (
        "import sys\nfrom search.cli import main\nstatus = main(['trace', '--model', 'tiny-llama', '--seq-len', '32'])"
    )
    assert main(["trace", "--model", "tiny-llama", "--seq-len", "32"]) == 0
    program = f"{command}\nimport piper_core\npiper_core.annotate('PP'), piper_core.trace_model\nassert status == 0\n"
    program += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_json(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--model", "tiny-moe", "--seq-len", "32", "--micro-batch", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["micro_batch"], found["seq_len"]) == (found["parameters"], 2, 32)
    assert found["active_parameters"] < found["parameters"]
    wanted = {
        "id",
        "region",
        "phase",
        "count",
        "flops",
        "bytes_read",
        "bytes_written",
        "parameter_bytes",
        "saved_bytes",
    }
    assert all(wanted <= set(row) for row in found["chunks"])
    assert [(row["id"], row["phase"], row["count"]) for row in found["chunks"]] == [
        (chunk, phase, count)
        for chunk, count in (("embed", 1), ("L0.attention", 8), ("L0.router", 8), ("L0.expert", 8), ("head", 1))
        for phase in ("F", "B", "BI", "BW")
    ]


def test_table(cache: Cache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--model", "tiny-llama", "--seq-len", "64"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["chunk", "phase", "count"]
    assert len(out) == 1 + 4 * 4 + 1
    assert out[-1].startswith("tiny-llama: ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "lama9b"], "unknown model 'lama9b'; the nearest names are llama9b"),
        (["--model", "tiny-llama", "--seq-len", "0"], "must be an integer of at least 1"),
        (["--model", "gpt3-175b", "--seq-len", "4096"], "sequence length must be 1 to 2048, found 4096"),
        (["--model", "tiny-llama", "--seq-len", "4096"], "sequence length must be 1 to 2048, found 4096"),
        (["--model", "tiny-llama", "--dtype", "int8"], "dtype must be bfloat16, float16, float32, float64"),
        (["--model", "nowhere.py:make"], "no file 'nowhere.py'"),
        ([], "required: --model"),
    ],
)
def test_bad_options(cache: Cache, capsys: pytest.CaptureFixture[str], arguments: list[str], error: str) -> None:
    assert main(["trace", *arguments]) == 2
    assert error in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "function", "error"),
    [
        ("def make(:", "make", "importing it fails at mine.py:1: SyntaxError"),
        ("import nowhere_to_be_found", "make", "importing it fails at mine.py:1 .*ModuleNotFoundError"),
        ("def make(): pass", "build", "mine.py has no function 'build'; it has make"),
        ("def make(): return 3", "make", "must return .model, example inputs.*found int"),
        ("from torch import nn\ndef make(): return nn.Linear(2, 2), 3", "make", "found tuple of Linear, int"),
        ("def make():\n    return 1 / 0", "make", r"make\(\) fails at mine.py:2 \(return 1 / 0\): ZeroDivisionError"),
        ("def make():\n    return 1 / 0", "not a name", "no such file"),
        ("raise SystemExit(3)", "make", "importing it fails at mine.py:1 .raise SystemExit.3.*SystemExit: 3"),
        ("def make():\n    raise SystemExit(3)", "make", r"make\(\) fails at mine.py:2 .*SystemExit: 3"),
        ("def make():\n    raise ValueError('no luck\\nat all')", "make", "ValueError: no luck at all"),
        ("from torch import nn\ndef make(): return nn.Linear(2, 2)", "make", "found Linear"),
        ("from torch import nn\ndef make(): return nn.Linear(2, 2), ()", "make", "found tuple of Linear, tuple"),
    ],
)
def test_bad_files(cache: Cache, tmp_path: Path, text: str, function: str, error: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        trace_model(f"{path}:{function}")


def test_a_forward_that_branches_on_a_value_is_named_by_its_line(
    cache: Cache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    text = MODEL.format(width=4, extra="").replace("self.linear(x).sum()", "x if self.linear(x).sum() > 0 else -x")
    path.write_text(text)
    assert main(["trace", "--model", f"{path}:make"]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert "mine.py:10 (return x if self.linear(x).sum() > 0 else -x) needs the value of a tensor" in error[0]


def test_a_model_that_needs_real_tensors_to_be_built_is_built_for_real(cache: Cache, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = MODEL.format(width=4, extra="").replace("Linear(4, 4)", "Linear(4, int(torch.ones(4).sum().item()))")
    path.write_text(text)
    assert trace_model(f"{path}:make").model().parameters == 20


def test_a_function_loads_with_and_without_memory(tmp_path: Path) -> None:
    (tmp_path / "width_beside.py").write_text("WIDTH = 4")
    path = tmp_path / "mine.py"
    text = MODEL.format(width="WIDTH", extra="from width_beside import WIDTH")
    path.write_text(text + "\ndef one():\n    return Model(), (torch.ones(2, WIDTH),)\n")
    for function in ("make", "one"):  # inputs by themselves or as a tuple
        model, inputs = load_function(path, function, real=True)
        assert [each.shape for each in inputs] == [(2, 4)]
        assert float(model(*inputs).detach()) == pytest.approx(float(model.linear(*inputs).detach().sum()))
        model, inputs = load_function(path, function)
        assert isinstance(inputs[0], FakeTensor)


def test_a_sequence_length_is_not_for_a_file(cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --seq-len out"):
        trace_model(write(tmp_path / "mine.py"), seq_len=16)
