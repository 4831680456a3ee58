"""Hardware files: every number with a source, every bad number refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper_core.errors import ConfigError
from profiler.spec import HARDWARE, Cluster, cluster_ids, device_ids, load_cluster, load_device, sources


def written(tmp_path: Path, change: dict[str, Any], base: str = "p4d.cluster.json") -> str:
    data = json.loads((HARDWARE / base).read_text())
    for key, value in change.items():
        if value is None:
            del data[key]
        else:
            data[key] = value
    path = tmp_path / "own.json"
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize("name", cluster_ids())
def test_every_number_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert isinstance(cluster, Cluster)
    found = sources(name)
    assert all(found.values())
    assert {"link_bytes_per_s", "nic_bytes_per_s", "device.matmul_flops", "device.memory_bytes"} <= set(found)


def test_the_promised_ids_are_there() -> None:
    assert {"p4d", "p4de", "dgx-a100", "p5", "dgx-h100", "cpu"} <= set(cluster_ids())
    assert {"a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm"} <= set(device_ids())
    assert load_cluster("p4d").device is load_device("a100-sxm-40gb")


def test_a_file_of_ones_own_works_the_same(tmp_path: Path) -> None:
    device = json.loads((HARDWARE / "h100-sxm.device.json").read_text())
    path = written(tmp_path, {"name": "mine", "device": device, "gpus_per_node": {"value": 4, "source": "here"}})
    cluster = load_cluster(path)
    assert (cluster.name, cluster.gpus_per_node, cluster.device) == ("mine", 4, load_device("h100-sxm"))
    assert sources(path)["gpus_per_node"] == "here"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"nic_bytes_per_s": {"value": float("nan"), "source": "x"}},
            "nic_bytes_per_s must be a finite number",
        ),
        ({"nic_bytes_per_s": {"value": -1, "source": "x"}}, "nic_bytes_per_s must be positive"),
        ({"nics_per_node": {"value": 0, "source": "x"}}, "nics_per_node must be positive"),
        ({"gpus_per_node": {"value": 7.5, "source": "x"}}, "gpus_per_node must be a whole number"),
        ({"link_efficiency": {"value": 1.5, "source": "x"}}, "at most 1"),
        ({"link_latency_s": {"value": True, "source": "x"}}, "finite number"),
        ({"link_latency_s": 1e-6}, "link_latency_s must be"),
        ({"ramp_bytes": None}, "missing ramp_bytes"),
        ({"colour": {"value": 1, "source": "x"}}, "unknown field 'colour'"),
        ({"device": None}, "device must be an id"),
        ({"device": "a100"}, "unknown device 'a100'; the nearest ids are a100-"),
        ({"name": 7}, "name must be text"),
    ],
)
def test_bad_numbers_are_refused_in_a_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_cluster(written(tmp_path, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1, "name": 2}', "[" * 100_000])
def test_files_that_are_no_record_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_cluster(str(path))


def test_unknown_names_give_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nearest ids are p4d"):
        load_cluster("p4dd")
    with pytest.raises(ConfigError, match="No such file"):
        load_cluster(str(tmp_path / "none.json"))
