"""Rows of published tables as requests: what columns and notes say, and what is refused."""

from __future__ import annotations

import pytest

from piper_core.errors import ConfigError
from piper_core.names import Sync
from search.table_mode import predict_row
from search.validation.facts import FITS, SMALL, STEPS, load_facts
from search.validation.rows import NotExpressedError, request_of

STEP_ROWS = load_facts(STEPS)
ROW = next(row for row in STEP_ROWS if row["model"] == "LLaMA-13B" and row["tp"] == "2.0" and row["pp"] == "2.0")


def row_of(source: str, **columns: str) -> dict[str, str]:
    return next(
        row for row in STEP_ROWS
        if row["source"].startswith(source) and all(row[name].startswith(value) for name, value in columns.items())
    )  # fmt: skip


def test_nearly_every_row_is_a_request() -> None:
    reasons = []
    for name in (STEPS, FITS, SMALL):
        for row in load_facts(name):
            try:
                request_of(row).resolve()
            except NotExpressedError as error:
                reasons.append(str(error))
    assert len(reasons) == 22
    assert all("modelled" in why or "not published" in why for why in reasons)


def test_measured_columns_are_never_read() -> None:
    measured = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gb", "printed_mfu_pct", "printed_tflops_hw",
                "printed_tflops_model", "uniform_mfu_pct", "step_time_how")  # fmt: skip
    for row in STEP_ROWS[::7]:
        blank = row | dict.fromkeys(measured, "nonsense")
        assert predict_row(row) == predict_row(blank) if row is ROW else True
        try:
            wanted = request_of(row)
        except NotExpressedError:
            continue
        assert request_of(blank) == wanted


@pytest.mark.parametrize(
    ("kernel", "attention", "norm"),
    [
        ("flash_attention2 + RMS kernel", "flash2", "fused"),
        ("flash_attention2", "flash2", "unfused"),
        ("flash_attentionv1.0.8", "flash1", "unfused"),
        ("fused", "unfused", "unfused"),
        ("torch", "eager", "unfused"),
    ],
)
def test_kernels_come_from_notes(kernel: str, attention: str, norm: str) -> None:
    kernels = request_of(ROW | {"notes": f"trial 1; kernel={kernel}; more"}).kernels
    assert (kernels.attention, kernels.norm) == (attention, norm)


def test_a_zero_bubble_row() -> None:
    request = request_of(row_of("Qi", schedule="ZB-V"))
    assert request.schedule == "zbv"
    assert request.sync is Sync.POST_VALIDATION
    assert isinstance(request.layers, tuple)
    assert request.layers[0] == request.layers[-1] == 0
    assert sum(request.layers) == request.architecture.layers
    late = row_of("Qi", schedule="ZB-2p") | {"notes": "all-reduce synchronisation instead of post-validation"}
    assert request_of(late).sync is Sync.GLOBAL_NORM


def test_habits_come_from_the_framework() -> None:
    assert request_of(ROW).software.gradient_bytes == 2
    assert request_of(ROW).software.separate_gate
    assert request_of(ROW).layers == (21, 19)  # of 43 modules 22 and 21: embedding; norm and head
    assert request_of(row_of("InternLM", notes="zero1 group=8")).software.shard_group == 8
    everywhere = row_of("InternLM", notes="zero1 group=-1")
    assert request_of(everywhere).software.shard_group == float(everywhere["dp"])
    assert request_of(load_facts(SMALL)[0]).bucket_mib == 0


def test_the_network_is_the_printed_one() -> None:
    assert request_of(row_of("InternLM")).cluster.nics_per_node == 4
    assert request_of(row_of("InternLM")).cluster.nic_bytes_per_s == 12.5e9
    assert request_of(row_of("mosaicml", gpu="A100")).cluster.nic_bytes_per_s == 25e9
    assert request_of(row_of("mosaicml", gpu_mem_gb="40")).cluster.device.name == "A100-SXM-40GB"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": "BERT"}, "no family"),
        ({"gpu": "TPU"}, "not known here"),
        ({"schedule": "ring"}, "schedule 'ring'"),
        ({"schedule": ""}, "schedule is not published"),
        ({"activation_recompute": ""}, "activation_recompute is not published"),
        ({"activation_recompute": "selective-op"}, "not modelled"),
        ({"dtype": "fp8"}, "fp8"),
        ({"notes": "kernel=own"}, "kernel 'own'"),
        ({"tp": ""}, "tp is not published"),
    ],
)
def test_what_is_not_said_is_not_guessed(changed: dict[str, str], words: str) -> None:
    with pytest.raises(NotExpressedError, match=words):
        request_of(ROW | changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tp": "-2"}, "column tp: expected a number of at least 0"),
        ({"global_batch": "nan"}, "column global_batch"),
        ({"pp": "1.5"}, "column pp: expected a whole number"),
        ({"hidden": "wide"}, "column hidden"),
    ],
)
def test_numbers_that_are_none_are_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        request_of(ROW | changed)
    assert not isinstance(caught.value, NotExpressedError)


def test_a_strategy_that_does_not_go_is_named() -> None:
    assert "not divisible" in str(predict_row(ROW | {"global_batch": "2047"}))
