"""A person's own model by ``file.py:function``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from piper_core.errors import ConfigError
from piper_core.models import load_model

GOOD = """
import torch
from torch import nn
from helper_of_the_model import WIDTH

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.linear(x).mean()

def build():
    return Net(), (torch.zeros(2, WIDTH),)

def single():
    return Net(), torch.zeros(2, WIDTH)

def fails():
    raise ValueError("no luck\\nat all")

def only_module():
    return Net()

def no_inputs():
    return Net(), ()

def scalars():
    return Net(), (torch.zeros(()),)

def quits():
    raise SystemExit(3)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_the_model.py").write_text("WIDTH = 3\n")
    path = tmp_path / "model.py"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize("function", ["build", "single"])
def test_a_module_and_its_inputs(file: Path, function: str) -> None:
    module, inputs = load_model(f"{file}:{function}")
    assert [tuple(each.shape) for each in inputs] == [(2, 3)]
    assert module(*inputs).shape == torch.Size([])


@pytest.mark.parametrize(
    ("function", "word"),
    [
        ("fails", "line 21: ValueError: no luck"),
        ("only_module", "must return"),
        ("no_inputs", "at least one"),
        ("scalars", "batch"),
        ("quits", "SystemExit"),
        ("missing", "it has Net, build"),
        ("not a name", "form"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(file: Path, function: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        load_model(f"{file}:{function}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [("x = (", "line 1: SyntaxError"), ("import nothing_like_it", "line 1: ModuleNotFoundError"), ("", "it has none")],
)
def test_a_file_that_does_not_run(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=word):
        load_model(f"{tmp_path / 'bad.py'}:build")


@pytest.mark.parametrize("text", ["", ":", "model.py", "model.txt:build", "nowhere.py:build", "llama9b"])
def test_text_that_names_no_function(text: str) -> None:
    with pytest.raises(ConfigError, match=r"form|there is no file"):
        load_model(text)
