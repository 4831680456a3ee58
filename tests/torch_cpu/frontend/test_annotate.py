"""Annotations: what they put on nodes of both passes, and what they cost where nothing is captured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from piper_core import annotate
from piper_core.errors import ConfigError
from piper_core.frontend.annotate import recording
from piper_core.frontend.assign import assign
from piper_core.frontend.capture import Joint, capture
from piper_core.names import Region
from tests.torch_cpu.frontend.small import Circle, Plain, Staged


def tags(joint: Joint, operator: str) -> list[dict[str, object]]:
    """Return the tags of calls of an operator in both passes, without the root's."""
    found = []
    for node in joint.nodes:
        if node.op == "call_function" and str(node.target) == operator:
            custom = node.meta.get("custom") or {}
            found.append({k.removeprefix("piper."): v for k, v in custom.items() if k != "piper.ROOT"})
    return found


def test_indices_count_in_trace_order_and_tags_nest() -> None:
    joint = capture(Staged(), (torch.randn(3, 4),))
    second = {"PP": 1, "REGION": "attention", "EP": 0}
    assert tags(joint, "aten.addmm.default") == [{"PP": 0}, second]
    assert tags(joint, "aten.relu.default") == [{"PP": 0}]


def test_backward_nodes_carry_the_tags_of_their_forward() -> None:
    joint = capture(Staged(), (torch.randn(3, 4),))
    assert tags(joint, "aten.threshold_backward.default") == [{"PP": 0}]
    second = {"PP": 1, "REGION": "attention", "EP": 0}
    assert tags(joint, "aten.mm.default") == [second, second, {"PP": 0}]


def test_a_second_capture_counts_from_0_again() -> None:
    model = Staged()
    first, second = (capture(model, (torch.randn(3, 4),)) for _ in range(2))
    assert tags(first, "aten.addmm.default") == tags(second, "aten.addmm.default")


def test_nothing_happens_outside_a_capture() -> None:
    scope = annotate("PP")
    with scope:
        pass
    assert scope._entered == []
    assert Staged()(torch.randn(3, 4)).dim() == 0


def test_annotations_do_not_break_a_compiled_model() -> None:
    model = Staged()
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_annotations_survive_dynamo_capture() -> None:
    """Relies on torch._dynamo.functional_export and on Dynamo's handling of torch.fx.traceback.annotate."""
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    with recording():
        module = dynamo_graph_capture_for_export(Staged())(torch.randn(3, 4))
    calls = [node for node in module.graph.nodes if node.op in ("call_function", "call_method")]
    custom = [node.meta.get("custom") or {} for node in calls]
    assert [each["piper.PP"] for each in custom if "piper.PP" in each] == [0, 0, 1]
    torch._dynamo.reset()


@pytest.mark.parametrize("tag", ["", "MB", "PASS", "REGION", "two words", "1st", "x" * 65, 7])
def test_tags_that_cannot_be_names_are_refused(tag: str) -> None:
    with pytest.raises(ConfigError, match="annotate needs a name"):
        annotate(tag)


def test_blocks_and_their_parts_are_annotated_by_themselves() -> None:
    made = assign(capture(Plain(), (torch.randn(2, 4),)))
    names = [str(site) for site in made.sites]
    layers = [f"L{i}.{part}" for i in range(3) for part in ("attention", "mlp")]
    assert names == ["embed", *layers, "head"]


def test_norms_go_with_what_follows_and_residuals_with_what_came_before() -> None:
    joint = capture(Plain(), (torch.randn(2, 4),))
    made = assign(joint)
    where = {
        operator: [str(made.sites[made.site_of[n]]) for n in joint.nodes if str(n.target) == operator][:2]
        for operator in ("aten.native_layer_norm.default", "aten.add.Tensor")
    }
    assert where == {operator: ["L0.attention", "L0.mlp"] for operator in where}


def test_a_persons_own_region_wins() -> None:
    class Own(Plain.Block):
        def forward(self, x: Tensor) -> Tensor:
            with annotate("mlp"):
                return x + self.attn(x)

    model = Plain()
    model.blocks = nn.ModuleList(Own(8) for _ in range(2))
    made = assign(capture(model, (torch.randn(2, 4),)))
    assert {site.region for site in made.sites} == {Region.EMBED, Region.MLP, Region.HEAD}


def test_regions_that_feed_each_other_in_a_circle_are_one() -> None:
    made = assign(capture(Circle(), (torch.randn(2, 4),)))
    assert [str(site) for site in made.sites] == ["L0.attention", "head"]


def test_a_capture_leaves_the_model_as_it_was() -> None:
    model = Plain()
    capture(model, (torch.randn(2, 4),))
    assert all("forward" not in vars(module) for module in model.modules())
