"""Alpha-beta times of collectives and messages on a two-tier cluster.

A ring crosses each node's boundary once, so the members of a node share its network cards, and the ring
runs at the slower of link and network. All devices of a node are taken to communicate at once, each with
its own group: a group with k of the node's G devices gets k / G of the node's bandwidth.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import assert_never

from piper_core.names import Collective
from profiler.spec import Cluster


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How a group lies on the nodes: its size, the nodes it touches, fewest and most members in one."""

    size: int
    nodes: int
    fewest: int
    most: int


@lru_cache(maxsize=65536)
def group_shape(ranks: tuple[int, ...], gpus_per_node: int) -> GroupShape:
    """Return the shape of ``ranks``; rank r is on node r // gpus_per_node."""
    held = Counter(rank // gpus_per_node for rank in ranks).values()
    return GroupShape(len(ranks), len(held), min(held), max(held))


def collective_seconds(cluster: Cluster, kind: Collective, size: float, shape: GroupShape) -> float:
    """Return the time of one collective of ``size`` bytes (``CostModel`` says of what)."""
    members = shape.size
    if members <= 1 or size <= 0 or kind is Collective.NONE:
        return 0.0
    share = (members - 1) / members
    link, network = _rates(cluster, shape)
    ring = min(link, network)
    latency = _latency(cluster, shape)
    match kind:
        case Collective.ALL_REDUCE:
            return 1.4 * latency + 2 * share * _ramped(cluster, size) / ring
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            return _ring_latency(cluster, shape) + share * _ramped(cluster, size) / ring
        case Collective.ALL_TO_ALL:
            outside = (members - shape.fewest) / members if shape.nodes > 1 else 0.0
            one = network / shape.fewest
            return latency + max(share * size / link, outside * size / one)
        case Collective.RING_EXCHANGE:  # members - 1 steps, each as slow as the worst hop
            hop = _network_hop(cluster, shape.fewest) if shape.nodes > 1 else link
            step = cluster.network_latency_s if shape.nodes > 1 else cluster.link_latency_s
            return cluster.collective_latency_s + (members - 1) * step + share * size / min(link, hop)
        case _:
            assert_never(kind)


def send_seconds(cluster: Cluster, size: float, sources: tuple[int, ...], destinations: tuple[int, ...]) -> float:
    """Return the time in which each source sends ``size`` bytes to the destination at its position.

    Pairs between nodes share the cards of the source's node; one device drives at most one card.
    """
    per_node = cluster.gpus_per_node
    flows: Counter[int] = Counter()
    inside = False
    for source, destination in zip(sources, destinations, strict=True):
        if source == destination:
            continue
        if source // per_node == destination // per_node:
            inside = True
        else:
            flows[source // per_node] += 1
    slowest = 0.0
    if inside:
        slowest = cluster.link_latency_s + size / (cluster.link_bytes_per_s * cluster.link_efficiency)
    if flows:
        rate = min(_card(cluster), cluster.node_bytes_per_s / max(flows.values()))
        slowest = max(slowest, cluster.network_latency_s + size / rate)
    return slowest


def _rates(cluster: Cluster, shape: GroupShape) -> tuple[float, float]:
    """Bytes/s of a ring inside a node, and between nodes (infinite for a group on one)."""
    link = cluster.link_bytes_per_s * cluster.link_efficiency
    if shape.nodes == 1:
        return link, float("inf")
    return link, cluster.node_bytes_per_s * min(1.0, shape.fewest / cluster.gpus_per_node)


def _network_hop(cluster: Cluster, members: int) -> float:
    """Bytes/s of one device's flow to the next node, while ``members`` of each node are in its group."""
    return min(_card(cluster), cluster.node_bytes_per_s * min(1.0, members / cluster.gpus_per_node))


def _card(cluster: Cluster) -> float:
    return cluster.nic_bytes_per_s * cluster.network_efficiency / cluster.oversubscription


def _latency(cluster: Cluster, shape: GroupShape) -> float:
    """Fixed part: start, hops inside the fullest node, a tree over the nodes."""
    return (
        cluster.collective_latency_s
        + cluster.link_latency_s * (shape.most - 1)
        + cluster.network_latency_s * log2(shape.nodes)
    )


def _ring_latency(cluster: Cluster, shape: GroupShape) -> float:
    """Fixed part where a ring alone will do: start, and a step for each member but one."""
    return (
        cluster.collective_latency_s
        + cluster.link_latency_s * (shape.size - shape.nodes)
        + cluster.network_latency_s * (shape.nodes - 1)
    )


def _ramped(cluster: Cluster, size: float) -> float:
    """``size`` plus what the pipeline loses before it runs at full speed.

    The loss grows with the message and levels off at ``ramp_bytes``.
    """
    ramp = cluster.ramp_bytes
    return size + (ramp * size / (size + ramp / 4) if ramp else 0.0)
