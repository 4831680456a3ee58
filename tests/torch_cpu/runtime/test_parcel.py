"""A cut travels as bytes, and who reads one starts without torch's compiler."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from piper_core.arch.presets import PRESETS
from piper_core.frontend.cut import is_view
from piper_core.frontend.degrees import Degrees
from piper_core.runtime.model import ArchitectureSource

CASES = [
    ("tiny-llama", Degrees(context=2)),
    ("tiny-moe", Degrees(tensor=2, sequence=True, expert=2)),
]

READER = """
import pickle, sys
import piper_core.runtime.actor, piper_core.runtime.gloo, piper_core.runtime.program
import torch
from piper_core.runtime.optimizer import AdamW, Updater
source = pickle.load(open(sys.argv[1], "rb"))
piece = source.cut.pieces[0]
print(piece.forward.digest())
Updater(AdamW(), [torch.zeros(4)]).update([torch.ones(4)])
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("torch._")} & {"_dynamo", "_inductor"}))
"""


@pytest.mark.parametrize(("model", "degrees"), CASES, ids=[name for name, _ in CASES])
def test_read_back_a_cut_is_the_same(model: str, degrees: Degrees, tmp_path: Path) -> None:
    source = ArchitectureSource(PRESETS[model], 1, 16, degrees)
    made = source.cut
    data = pickle.dumps(source)
    read = pickle.loads(data).cut
    assert read is not made
    assert [node.name for node in read.joint.nodes] == [node.name for node in made.joint.nodes]
    assert (read.joint.parameters, read.joint.inputs) == (made.joint.parameters, made.joint.inputs)
    assert [is_view(node) for node in read.joint.nodes] == [is_view(node) for node in made.joint.nodes]
    assert [[node.name for node in values] for *_, values in read.edges] == [
        [node.name for node in values] for *_, values in made.edges
    ]
    phases = ("forward", "backward", "backward_input", "backward_weight")
    for one, other in zip(read.pieces, made.pieces, strict=True):
        assert one.site == other.site
        assert [getattr(one, each).digest() for each in phases] == [getattr(other, each).digest() for each in phases]
        assert one.recompute().digest() == other.recompute().digest()
    (tmp_path / "source").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "source")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [made.pieces[0].forward.digest(), "[]"]
