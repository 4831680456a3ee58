"""Plans and DAGs as text: what is written reads back equal, and what is not a plan's is refused."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from piper_core.errors import DirectiveError, PlanError
from piper_core.ir.text import from_json, to_json
from piper_core.program.program import Program
from piper_core.schedule.compile import compile_program
from piper_core.schedule.plan import Plan, expand
from piper_core.schedule.plan_text import format_plan, parse_plan
from piper_core.schedule.verify import verify
from tests.null.laws.ladder import MESH, ORDER, PROGRAMS, ladder
from tests.null.laws.test_pipelines import WAYS, build

SIGNS = "0123456789 ,.<>@#:!()|-FBRW\n"


def plan(model: str = "moe", step: str = "replicated") -> Plan:
    return compile_program(Program.parse([*PROGRAMS[step], ORDER]), ladder(model)["base"], MESH).plan


def test_a_plan_reads_like_this() -> None:
    """Tables, then a line a stream: ``@`` the line that an action meets others on, ``<`` what it waits for."""
    dag, program = build("1f1b", 2, 2, 1, WAYS["ZeRO-1"])
    made = compile_program(program, dag).plan
    text = format_plan(made)
    lines = text.splitlines()
    assert lines[:6] == [
        "plan sync global_norm microbatches 2",
        "row 0: 0,1",
        "row 1: 2,3",
        "stage 0: from -",
        "stage 1: from 0",
        "repeated: - -",
    ]
    assert "channel 0: 0>1 F" in lines
    assert "bucket 0: stage 0, gathered as it is, reduced step; forward *; backward -; again -; weight *" in lines
    (row,) = (line for line in lines if line.startswith("stream 1 "))
    assert row.startswith("stream 1 row 1 compute compute: 1F0<")
    assert parse_plan(text).same_as(made)


@pytest.mark.parametrize("step", ["placed", "sharded", "sequence", "replicated"])
def test_plans_read_back(step: str) -> None:
    for model in ("dense", "moe"):
        made = plan(model, step)
        for each in (made, expand(made)):
            text = format_plan(each)
            back = parse_plan(text)
            assert back.same_as(each)
            assert format_plan(back) == text
            verify(back)


def test_names_with_signs_read_back() -> None:
    place = [{"op": "place", "filter": {"PP": s}, "devices": [s], "stream": 'a "b": c'} for s in range(2)]
    made = compile_program(Program.parse([PROGRAMS["staged"][0], *place]), ladder("dense")["base"]).plan
    assert parse_plan(format_plan(made)).same_as(made)


@pytest.mark.parametrize(("text", "what"), [
    ("", "a plan without streams"),
    ("plan sync maybe microbatches 2", "line 1 of the plan: it does not read as a plan's"),
    ("hello", "line 1 of the plan: it does not read as a plan's"),
    ("row 0: 0\nstream 0 row 0 compute compute: 0F0 0Q0", "line 2 of the plan: cannot read action '0Q0'"),
    ("row 0: 0\nstream 1 row 0 compute compute: 0F0", "line 2 of the plan: stream 1 is out of turn"),
    ("row 0: 0\nstream 0 row 3 compute compute: 0F0", "a plan names row 3"),
    ("row 0: 0\nstream 0 row 0 compute compute: 0F0@4", "a plan names line 4"),
    ("row 0: 0\nstream 0 row 0 compute compute: 0F0<0.7", "a plan names in stream 0 action 7"),
    ("row 0: 99999999999", "line 1 of the plan: a number is too large"),
    ("channel 0: 0>1", "line 1 of the plan: it does not read as a plan's"),
    ("parts 0 F: a(0)", "line 1 of the plan"),
])  # fmt: skip
def test_what_is_no_plan(text: str, what: str) -> None:
    with pytest.raises(DirectiveError) as caught:
        parse_plan(text)
    assert what in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def harm(rng: Random, text: str) -> str:
    """Change some characters or lines."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, lines = rng.randrange(len(text)), text.split("\n")
        match rng.randrange(6):
            case 0:
                text = text[:at] + text[at + 1 :]
            case 1:
                text = text[:at] + rng.choice(SIGNS) + text[at:]
            case 2:
                text = text[:at] + rng.choice(SIGNS) + text[at + 1 :]
            case 3:
                lines.pop(rng.randrange(len(lines)))
                text = "\n".join(lines)
            case 4:
                lines.insert(rng.randrange(len(lines)), rng.choice(lines))
                text = "\n".join(lines)
            case _:
                rng.shuffle(lines)
                text = "\n".join(lines)
    return text


def test_harmed_text_never_crashes() -> None:
    """It is refused, or is a plan that the verifier accepts or refuses; never anything else."""
    whole = [format_plan(plan(model, step)) for model, step in (("dense", "placed"), ("moe", "replicated"))]
    dag, program = build("dualpipev", 2, 4, 2, WAYS["experts overlapped, ZeRO-3"])
    whole.append(format_plan(compile_program(program, dag).plan))
    rng, seen = Random(0), Counter[str]()
    for _ in range(1200):
        try:
            made = parse_plan(harm(rng, rng.choice(whole)))
        except DirectiveError:
            seen["refused"] += 1
            continue
        assert parse_plan(format_plan(made)).same_as(made)
        try:
            verify(made)
            seen["verified"] += 1
        except PlanError as error:
            seen[error.reason] += 1
    assert seen["refused"] > 300
    assert seen["verified"] > 10
    assert len(seen) >= 5


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"count": 1}', "null", "[" * 100_000, "nan"])
def test_what_is_no_dag(text: str) -> None:
    with pytest.raises(DirectiveError, match="the text of a DAG cannot be read"):
        from_json(text)


def test_a_dag_of_wrong_types_is_refused() -> None:
    text = to_json(ladder("dense")["replicated"])
    for old, new in (('"layers": 4', '"layers": "4"'), ('"sync": "global_norm"', '"sync": "never"'),
                     ('"microbatches": 4', '"microbatches": null'), ('"groups": [[', '"groups": [[[')):  # fmt: skip
        assert old in text
        with pytest.raises(DirectiveError):
            from_json(text.replace(old, new, 1))
