"""Laws of every directive, on DAGs at every step of compilation."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from piper_core.directives import CANONICAL, OPS, Directive, Order, parse_directive
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag
from piper_core.ir.text import from_json, to_json
from piper_core.ir.verify import verify_dag
from piper_core.program.program import Program
from tests.null.laws.ladder import MESH, PROGRAMS, SINGLE, ladder, snapshot

STEPS = tuple(ladder("dense"))
MODELS = ("dense", "moe")


def hold(directive: Directive[Any], dag: Dag) -> Dag:
    """Check the laws of one directive on one DAG; return what it makes."""
    before = snapshot(dag)
    text = json.dumps(directive.to_data())
    assert parse_directive(json.loads(text)) == directive
    assert type(directive).parse(directive.to_data()) == directive
    assert directive in type(directive).domain(dag, MESH)
    out = directive.apply(dag, MESH)
    assert snapshot(dag) == before, "the input has changed"
    verify_dag(out)
    assert out.equal(directive.apply(dag, MESH)), "a replay differs"
    assert from_json(to_json(out)).equal(out)
    return out


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step", STEPS)
def test_ladder_is_verified(model: str, step: str) -> None:
    dag = ladder(model)[step]
    verify_dag(dag)
    assert from_json(to_json(dag)).equal(dag)


@pytest.mark.parametrize("step", SINGLE)
def test_named_instances(step: str) -> None:
    for model in MODELS:
        dag = ladder(model)[step]
        for data in SINGLE[step]:
            if model == "dense" and "EP" in data.get("filter", {}):
                continue
            hold(parse_directive(data), dag)


@pytest.mark.parametrize("kind", CANONICAL)
@pytest.mark.parametrize("step", STEPS)
def test_sampled_instances_and_their_neighbours(kind: type[Directive[Any]], step: str) -> None:
    """A domain's samples apply; where nothing is legal, sampling says so. So do all neighbours."""
    for model in MODELS:
        dag = ladder(model)[step]
        for seed in range(6):
            domain = kind.domain(dag, MESH)
            assert domain.fields
            try:
                directive = domain.sample(seed)
            except DirectiveError:
                continue
            assert isinstance(directive, kind)
            assert directive == kind.domain(dag, MESH).sample(seed)
            hold(directive, dag)
            for near in islice(directive.neighbours(dag, MESH), 3):
                assert near != directive
                hold(near, dag)


@pytest.mark.parametrize(("kind", "step"), [
    ("stage", "base"), ("split", "base"), ("split", "staged"), ("place", "split"),
    ("shard", "placed"), ("shard", "sharded"), ("replicate", "placed"), ("replicate", "placed both ways"),
    ("replicate", "sharded"), ("recompute", "placed"), ("recompute", "replicated"), ("order", "placed"),
    ("order", "recomputed"), ("order", "ordered"),
])  # fmt: skip
def test_domains_are_not_empty_where_they_should_not_be(kind: str, step: str) -> None:
    dag = ladder("moe")[step]
    made = {str(OPS[kind].domain(dag, MESH).sample(seed).to_data()) for seed in range(20)}
    assert len(made) > 1


@pytest.mark.parametrize("kind", CANONICAL)
def test_outside_the_domain_nothing_changes(kind: type[Directive[Any]]) -> None:
    """What a domain does not hold is refused, by the same error twice, and leaves the DAG as it was."""
    instances = [parse_directive(data) for step in SINGLE.values() for data in step if data["op"] == kind.op]
    refused = 0
    for step in STEPS:
        dag = ladder("dense")[step]
        before = snapshot(dag)
        for directive in instances:
            if directive in kind.domain(dag, MESH):
                continue
            refused += 1
            try:
                out = directive.apply(dag, MESH)
            except DirectiveError:
                pass
            else:  # rows that wait for each other: the DAG is made, and no domain holds it
                assert kind is Order
                assert not directive.legal(out)
            assert snapshot(dag) == before
    assert refused
    assert "text" not in kind.domain(ladder("dense")["base"], MESH)


@pytest.mark.parametrize("step", PROGRAMS)
def test_alone_and_in_a_program(step: str) -> None:
    """What directives do one after another is what they do in a program, before the step is closed."""
    base = ladder("dense")["base"]
    program = Program.parse(list(PROGRAMS[step]))
    dag = base
    for kind in CANONICAL:
        chosen = [directive for directive in program.directives if type(directive) is kind]
        if chosen:
            dag = kind.rewrite(dag, [directive.check(dag, MESH) for directive in chosen])
    assert dag.equal(ladder("dense")[step])
    if step in ("base", "staged", "half placed"):
        return
    whole = program.apply(base, MESH)
    n, e = len(dag), len(dag.edges)
    if dag.groups:  # closing appends; it changes nothing that is there
        assert whole.nodes.chunk[:n].tobytes() == dag.nodes.chunk.tobytes()
        assert whole.nodes.state[:n].tobytes() == dag.nodes.state.tobytes()
        assert whole.edges.src[:e].tobytes() == dag.edges.src.tobytes()
        assert whole.edges.dst[:e].tobytes() == dag.edges.dst.tobytes()
        assert whole.edges.role[:e].tobytes() == dag.edges.role.tobytes()
    assert Program.parse(json.loads(json.dumps(program.to_data()))) == program
    assert program.apply(base, MESH).equal(whole)
    backwards = Program(program.directives[::-1])
    assert backwards.canonical == (len({type(directive) for directive in program.directives}) == 1)
    verify_dag(whole)
