"""Chunk graphs, run in order, give the loss and gradients of eager autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from piper_core.frontend import operations
from piper_core.frontend.capture import capture
from piper_core.frontend.cut import cut
from piper_core.frontend.recompute import kept
from piper_core.frontend.run import Step, chunked
from piper_core.models import build_model
from piper_core.names import Recompute, Region
from tests.torch_cpu.frontend.small import Circle, Plain, Shared, Staged, gradients
from tests.torch_cpu.models.tiny import TINY, tokens

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def check(found: tuple[tuple[Tensor, ...], dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    (loss,), ours = found
    eager_loss, eager = wanted
    rtol = TOLERANCE[loss.dtype]
    torch.testing.assert_close(loss, eager_loss, rtol=rtol, atol=0)
    assert set(ours) == set(eager)
    for name, gradient in eager.items():
        error = (ours[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30)
        assert error <= rtol, name


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in TINY), *((name, torch.float32) for name in ("llama", "gpt", "mixtral"))],
)
def test_gradients_equal_eager_autograd(name: str, dtype: torch.dtype) -> None:
    """With B whole, with BI and BW apart, with each recompute policy; tied embeddings among the models."""
    model, x = build_model(TINY[name], layers=2, dtype=dtype), tokens()
    targets = x.roll(1)
    wanted = gradients(model, x, targets)
    made = cut(capture(model, (x, targets)))
    for split_backward in (False, True):
        for recompute in Recompute:
            step = Step(made, split_backward=split_backward, recompute=recompute)
            check(step(model, x, targets), wanted)


@pytest.mark.parametrize("kind", [Plain, Staged, Shared, Circle])
@pytest.mark.parametrize("split_backward", [False, True])
def test_a_persons_model(kind: type[nn.Module], split_backward: bool) -> None:
    torch.manual_seed(0)
    model = kind().double()
    x = torch.randn(3, 6 if kind is Shared else 4, dtype=torch.float64)
    check(chunked(model, (x,), split_backward=split_backward)(model, x), gradients(model, x))


def test_another_microbatch_needs_no_other_capture() -> None:
    model = Plain().double()
    step = chunked(model, (torch.randn(3, 4, dtype=torch.float64),))
    x = torch.randn(3, 4, dtype=torch.float64)
    check(step(model, x), gradients(model, x))


def test_gradients_of_inputs_and_given_gradients_of_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x, upstream = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    model(x).backward(upstream)
    _, found = chunked(model, (x,))(model, x, tangents=(upstream,))
    torch.testing.assert_close(found["input 0"], x.grad)
    torch.testing.assert_close(found["0.weight"], model[0].weight.grad)


def test_values_are_freed_after_their_last_use() -> None:
    model, x = build_model(TINY["llama"], layers=2), tokens()
    made = cut(capture(model, (x, x)))
    for recompute in Recompute:
        step = Step(made, recompute=recompute)
        values = step.bind(model) | dict.fromkeys(made.joint.inputs, x)
        values |= dict.fromkeys(made.joint.tangents, torch.ones(()))
        fixed = {*made.joint.parameters, *made.joint.buffers, *step.prelude.outputs}
        with torch.no_grad():
            step.run(values)
        results = {n.name for n in made.joint.outputs} | {n.name for p in made.pieces for _, n in p.gradients}
        assert set(values) - fixed <= results | set(made.joint.inputs)


def test_actions_of_a_split_backward_with_full_recompute() -> None:
    model, x = build_model(TINY["llama"], layers=1), tokens()
    step = Step(cut(capture(model, (x, x))), split_backward=True, recompute=Recompute.FULL)
    assert " ".join(action.name for action in step.actions) == (
        "embedF L0.attentionF L0.mlpF headF headBI L0.attentionR L0.mlpR L0.mlpBI L0.attentionBI "
        "headBW L0.mlpBW L0.attentionBW embedBW"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor's own imports
def test_compiled_graphs_give_the_same_gradients() -> None:
    """Relies on compile_fx_inner and select_decomp_table."""
    model, x = build_model(TINY["llama"], layers=2), tokens()
    step = chunked(model, (x, x), compiler="inductor")
    check(step(model, x, x), gradients(model, x, x))
    assert len(step._compiled) == 9  # of the second layer none


@pytest.mark.parametrize("policy", [Recompute.FULL, Recompute.SELECTIVE])
def test_recompute_routes_as_the_forward_did(policy: Recompute) -> None:
    """A bias that would send every token elsewhere comes between F and R; gradients are still those of F's routing."""
    model, x = build_model(TINY["deepseek"], layers=2, dtype=torch.float64), tokens()
    wanted = gradients(model, x, x)
    made = cut(capture(model, (x, x)))
    step = Step(made, recompute=policy)
    values = step.bind(model) | dict.fromkeys(made.joint.inputs, x)
    values |= dict.fromkeys(made.joint.tangents, torch.ones((), dtype=torch.float64))
    (bias,) = (name for name, full in made.joint.buffers.items() if full.endswith("router.bias"))
    with torch.no_grad():
        for action in step.actions:
            if action.name == "L1.routerR":
                values[bias] = torch.arange(8, 0, -1, dtype=torch.float64) * 10
            values.update(zip(action.outputs, action.call([values[name] for name in action.inputs]), strict=True))
    check((tuple(values[n.name] for n in made.joint.outputs), step.gradients(values)), wanted)


def test_of_routing_the_choice_alone_is_kept() -> None:
    made = cut(capture(build_model(TINY["deepseek"], layers=2), (tokens(), tokens())))
    for piece in made.pieces:
        stay = kept(piece, Recompute.FULL)
        routes = piece.site.region is Region.ROUTER
        assert [tuple(node.meta["val"].shape) for node in stay] == ([(32, 3)] if routes else [])
        again = [operations.name(node) for node in piece.recompute(stay, send=True).calls]
        assert again.count("sort") == routes  # rows by expert, of as many sorts as it takes to choose
        assert ("sigmoid" in again) == routes  # gate weights have gradients
