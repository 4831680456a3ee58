"""What measured runs say of predictions, applied to the scores of a search.

The residual model of a profile's runs multiplies a step by a factor of its own; all of a score's times are stretched
alike, so that they still add up. Bounds and proofs are of the profile's own costs: what was evaluated is ranked anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from profiler.record import Profile
from profiler.residual import Residual
from search.candidate import Score
from search.profiled import features
from search.result import Result

LEVEL = 0.9


@dataclass(frozen=True, slots=True)
class Calibration:
    """A residual model, and how many runs it learnt from."""

    residual: Residual
    runs: int

    @staticmethod
    def of(profile: Profile, runs: int | None = None) -> Calibration | None:
        """Return what a profile's runs say, the first ``runs`` alone where that is given; None where there are none."""
        known = sorted(profile.runs, key=lambda run: run.when)[:runs]
        return Calibration(Residual.of(known), len(known)) if known else None

    def interval(self, score: Score) -> tuple[float, float, float]:
        """Return (seconds, low, high) of a step that the profile's costs give: the middle and the ends of 90 %."""
        return self.residual.apply(score.step_time_s, features(score), LEVEL)

    def scaled(self, score: Score) -> Score:
        """Return a score with the recalibrated step time."""
        return stretched(score, self.interval(score)[0] / score.step_time_s) if score.step_time_s else score


def stretched(score: Score, by: float) -> Score:
    """Return a score in which all takes ``by`` times as long."""
    return replace(
        score,
        step_time_s=score.step_time_s * by,
        tokens_per_s_per_gpu=score.tokens_per_s_per_gpu / by,
        model_tflops_per_gpu=score.model_tflops_per_gpu / by,
        mfu=score.mfu / by,
        exposed_communication_s={kind: s * by for kind, s in score.exposed_communication_s.items()},
        breakdown={cause: s * by for cause, s in score.breakdown.items()},
    )


@dataclass(frozen=True, slots=True)
class Ranked:
    """Recalibrated candidates: ``intervals`` are (seconds, low, high) in the order of the result."""

    runs: int
    intervals: tuple[tuple[float, float, float], ...]
    moved: bool
    """Whether another candidate is first now."""

    def lines(self, most: int = 3) -> list[str]:
        """Return what to print."""
        said = [f"{i + 1}: {low:.4g} to {high:.4g} s" for i, (_, low, high) in enumerate(self.intervals[:most])]
        first = "; another row is first by them" if self.moved else ""
        return [
            f"step times are recalibrated by {self.runs} measured runs{first}; 90 % intervals {', '.join(said)}",
            "bounds, proof gap and what was ruled out are by the profile's costs, before that",
        ]

    def to_data(self, rank: int) -> dict[str, Any]:
        """Return the JSON form of one candidate's."""
        seconds, low, high = self.intervals[rank]
        return {"step_time_s": seconds, "low_s": low, "high_s": high, "runs": self.runs}


def recalibrate(result: Result, calibration: Calibration) -> Ranked:
    """Give the candidates of a finished search their recalibrated scores and rank, in place.

    Nothing is proved of them then: what was not evaluated was ruled out by other times.
    """
    first = result.best.config
    pairs = [
        (replace(each, score=calibration.scaled(each.score)), calibration.interval(each.score))
        for each in result.candidates
    ]
    pairs.sort(key=lambda pair: pair[0].rank(result.objective))
    result.candidates = [candidate for candidate, _ in pairs]
    result.least_left_s = result.least_s = 0.0
    return Ranked(calibration.runs, tuple(interval for _, interval in pairs), result.best.config != first)
