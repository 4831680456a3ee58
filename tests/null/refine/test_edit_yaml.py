"""Editing a YAML text in place: the data change, and nothing else does."""

from __future__ import annotations

import copy
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_core.errors import ProgramError
from piper_core.program.read import read_document
from piper_core.program.strategy import Strategy
from search.refine.edit_yaml import edit_yaml
from tests.null.export.strategies import data_parallel, pipeline

TEXT = """\
# what this is for
model: piper-1b          # a preset
cluster: p4de
mesh: {pp: 2, dp: 2}     # two rows
predicted:               # by the search
  step_time_s: 1.5       # seconds

  mfu: 0.5
directives:
  # the cut
  - {op: stage, layers_per_stage: [8, 8]}   # even
  - op: split            # in four
    num_microbatches: 4
    filter: {}
    dim_name: MB         # the tag

  # the order, by hand
  - op: order
    actions:
      0: 0F0 0F1 0B0 0B1   # row 0
      # between the rows
      1: "1F0 1B0 1F1 1B1"
# the end
"""
COMMENT = re.compile(r"#.*$", re.MULTILINE)


def data() -> dict:
    return copy.deepcopy(read_document(TEXT))  # type: ignore[return-value]  # TEXT is a mapping


def comments(text: str) -> list[str]:
    return COMMENT.findall(re.sub('"[^"]*"', '""', text))


def test_nothing_to_do() -> None:
    assert edit_yaml(TEXT, data()) == TEXT


def test_values_are_replaced_where_they_stand() -> None:
    new = data()
    new["predicted"]["step_time_s"] = 1.25
    new["directives"][0]["layers_per_stage"] = [9, 7]
    new["directives"][1]["num_microbatches"] = 8
    new["directives"][2]["actions"]["0"] = "0F0 0F1 (0B0 0B1)"
    new["directives"][2]["actions"]["1"] = "1F0 1F1 1B0 1B1"
    changed = (
        TEXT.replace("1.5 ", "1.25 ").replace("[8, 8]", "[9, 7]").replace("num_microbatches: 4", "num_microbatches: 8")
        .replace("0F0 0F1 0B0 0B1", "0F0 0F1 (0B0 0B1)").replace("1F0 1B0 1F1 1B1", "1F0 1F1 1B0 1B1")
    )  # fmt: skip
    assert edit_yaml(TEXT, new) == changed


def test_items_and_keys_come_and_go() -> None:
    new = data()
    new["directives"].insert(1, {"op": "recompute", "filter": {}, "policy": "full"})
    new["predicted"]["bubble_ratio"] = 0.1
    new["schedule"] = "1f1b"
    del new["cluster"]
    made = edit_yaml(TEXT, new)
    assert comments(made) == comments(TEXT)
    assert read_document(made) == new
    assert "\n  - {op: recompute, filter: {}, policy: full}" in made
    assert edit_yaml(made, {**new, "directives": [item for i, item in enumerate(new["directives"]) if i != 1]})


def test_a_comment_behind_what_goes_stays() -> None:
    new = data()
    del new["directives"][0]
    made = edit_yaml(TEXT, new)
    assert "# even" in made
    assert comments(made) == comments(TEXT)


@pytest.mark.parametrize("text", ["a: [1,   # one\n  2]\n", "a: {b: 1,  # one\n  c: 2}\n"])
def test_comments_inside_what_must_be_rewritten(text: str) -> None:
    old = read_document(text)
    assert isinstance(old, dict)
    new = {"a": [1, 3] if isinstance(old["a"], list) else {"b": 1}}
    with pytest.raises(ProgramError, match="line 1: this value must be rewritten"):
        edit_yaml(text, new)


SCALARS = st.one_of(
    st.integers(-9, 10**6), st.booleans(), st.sampled_from(["full", "0F0 0B0", "a: b", "# no", "", "7"])
)


@settings(max_examples=60)
@given(st.data())
def test_any_change_keeps_all_comments(draw: st.DataObject) -> None:
    new = data()
    for _ in range(draw.draw(st.integers(1, 4))):
        match draw.draw(st.integers(0, 5)):
            case 0:
                new["model"] = draw.draw(SCALARS)
            case 1:
                new["predicted"][draw.draw(st.sampled_from(["mfu", "step_time_s", "new"]))] = draw.draw(SCALARS)
            case 2:
                new["directives"][0]["layers_per_stage"] = draw.draw(st.lists(st.integers(1, 20), max_size=4))
            case 3:
                new["directives"][1]["num_microbatches"] = draw.draw(SCALARS)
            case 4:
                at = draw.draw(st.integers(1, 3))
                new["directives"].insert(min(at, len(new["directives"])), {"op": "recompute", "policy": "full"})
            case _:
                new["directives"][-1] = new["directives"][-1] | {"extra": draw.draw(SCALARS)}
    made = edit_yaml(TEXT, new)
    assert read_document(made) == new
    assert [text for text in comments(made) if text in comments(TEXT)] == comments(TEXT)


def test_a_strategy_that_a_search_wrote() -> None:
    made = pipeline("1f1b", 2, 4, row=2, more=[data_parallel()])
    other = pipeline("zb_h1", 2, 4, row=2, more=[data_parallel(shard_grads=True)], layers=[9, 7])
    text = made.to_text()
    edited = edit_yaml(text, other.to_data())
    assert Strategy.parse(read_document(edited)) == other
    assert comments(edited) == comments(text)
