"""By what a search prices: a profile in a file, with what its runs say, or nothing measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from piper_core.arch.huggingface import load_architecture
from piper_core.ir.dag import Dag
from piper_core.program.strategy import Strategy
from piper_core.schedule.compile import Compiled
from profiler.form import to_data
from profiler.record import Profile
from profiler.spec import Cluster, load_cluster
from profiler.store import load
from search.calibrate import Calibration
from search.candidate import Score
from search.predict import Prediction, predict_strategy
from search.profiled import Profiled, assess_by, base_of, price_strategy

DEFAULT_CLUSTER = "p4de"
SAID = ("profile", "runs")
"""What a header's ``predicted`` says of a profile beside its words."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """A profile, where it is, and the calibration by its runs (None: no runs)."""

    path: Path
    profile: Profile
    calibration: Calibration | None

    @staticmethod
    def of(path: Path, runs: int | None = None) -> Pricing:
        """Read a profile; only the first ``runs`` of its runs count where that is given.

        Raises:
            ConfigError: it cannot be read.
        """
        profile = load(path)
        return Pricing(path, profile, Calibration.of(profile, runs))

    def __str__(self) -> str:
        runs = f", recalibrated by {self.calibration.runs} measured runs" if self.calibration else ""
        return f"a profile of {self.profile.machine}{runs}"

    @property
    def costs_digest(self) -> str:
        """A hash of what prices alone depend on: runs and the time of measuring aside."""
        bare = replace(self.profile, runs=(), conditions=())
        return sha256(repr(to_data(bare)).encode()).hexdigest()[:12]

    def header(self) -> dict[str, Any]:
        """Return what a header's ``predicted`` says of it, from which :func:`said` finds it again."""
        runs = 0 if self.calibration is None else self.calibration.runs
        return {"by": str(self), "profile": str(self.path.resolve()), "runs": runs}

    def base(self, strategy: Strategy) -> Dag:
        """Return the DAG that a strategy's directives rewrite, in the profile's dtype."""
        return base_of(strategy, self.profile, load_architecture(strategy.header.model or ""))

    def score(self, strategy: Strategy, compiled: Compiled, cluster: Cluster) -> Score:
        """Score a strategy that is compiled from :meth:`base`, by the profile and its runs.

        Raises:
            ConfigError: the profile is of another model.
        """
        model, where = load_architecture(strategy.header.model or ""), f"profile {self.path}"
        found = assess_by(strategy, compiled, self.profile, model, cluster, where=where)[0].score
        return found if self.calibration is None else self.calibration.scaled(found)

    def price(self, strategy: Strategy) -> Profiled:
        """Price a strategy that names a model by the profile alone, on the cluster of its header, or on the CPU where
        the profile is of one.

        Raises:
            ConfigError: the profile is of another model; and as :func:`search.predict.predict_strategy`.
        """
        here = self.profile.machine.kind == "cpu"
        on = load_cluster("cpu" if here else strategy.header.cluster or DEFAULT_CLUSTER)
        model = load_architecture(strategy.header.model or "")
        return price_strategy(strategy, self.profile, model, on, where=f"profile {self.path}")

    def predict(self, strategy: Strategy) -> Prediction:
        """Price a strategy by the profile and its runs."""
        found = self.price(strategy).found
        return found if self.calibration is None else replace(found, score=self.calibration.scaled(found.score))


def said(strategy: Strategy) -> Pricing | None:
    """Return what a strategy's header says it was priced by; None where that was no profile.

    Raises:
        ConfigError: the profile cannot be read.
    """
    told = strategy.header.predicted
    path, runs = told.get("profile"), told.get("runs")
    if not isinstance(path, str):
        return None
    return Pricing.of(Path(path), runs if isinstance(runs, int) else None)


def predict_as_said(strategy: Strategy) -> Prediction:
    """Predict a strategy by what its header says it was priced by: a profile, or its cluster's record.

    Raises:
        ConfigError: that profile cannot be read; and as :func:`search.predict.predict_strategy`.
    """
    by = said(strategy)
    return predict_strategy(strategy) if by is None else by.predict(strategy)
