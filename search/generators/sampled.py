"""Optuna's samplers as a generator: TPE, NSGA-II for two objectives, or plain chance.

The study's storage is Optuna's own journal, so that optuna-dashboard opens it. A configuration that cannot apply, that
is over a memory floor, or that was drawn before is a pruned trial with its reason, not a bad value.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from piper_core.schedule.families import FAMILIES
from search.bound import Bounds
from search.candidate import Score
from search.space import Configuration, Space

if TYPE_CHECKING:
    import optuna

Sampler: TypeAlias = Literal["tpe", "nsga2", "random"]
SAMPLERS: tuple[Sampler, ...] = ("tpe", "nsga2", "random")
JOURNAL = "optuna.journal"
DRAWS = 100
"""Draws for each configuration asked for, after which a space counts as exhausted."""


class Sampled:
    """Draws configurations of a space: degrees first, then what those allow, one parameter of the study for each set of
    values that a choice can have.

    ``journal`` keeps the study in a file. NSGA-II minimises step time and the fullest row's memory, the others step
    time. Batches depend on ``seed`` and on what was told, not on who evaluates. ``order`` is given to all that is
    drawn, ``seen`` is not drawn again.
    """

    def __init__(
        self,
        space: Space,
        bounds: Bounds,
        capacity_bytes: float,
        *,
        sampler: Sampler = "tpe",
        seed: int = 0,
        journal: Path | None = None,
        name: str = "piper-search",
        order: str = "family",
        seen: Iterable[Configuration] = (),
    ) -> None:
        self.space, self.bounds, self.capacity = space, bounds, capacity_bytes
        self.name = f"Optuna {sampler}"
        self.expired = False
        self.pruned: dict[str, int] = {}
        self.study = _study(sampler, seed, journal, name)
        self._two = sampler == "nsga2"
        self._degrees = {" ".join(map(str, degrees)): degrees for degrees in space.degrees()}
        self._order, self._seen = order, set(seen)
        self._open: dict[Configuration, optuna.trial.Trial] = {}

    def ask(self, n: int, threshold_s: float = inf, deadline_s: float = inf) -> list[Configuration]:
        """Return up to ``n`` configurations that were not drawn before; none when there seem to be no more."""
        batch: list[Configuration] = []
        self.expired = False
        for _ in range(DRAWS * n):
            if len(batch) == n:
                break
            if time.perf_counter() > deadline_s:
                self.expired = True
                break
            trial = self.study.ask()
            config, reason = self._draw(trial)
            if config is None or reason:
                self._prune(trial, reason)
            else:
                self._seen.add(config)
                self._open[config] = trial
                batch.append(config)
        return batch

    def tell(self, config: Configuration, score: Score | None) -> None:
        """Hear of a configuration that was asked for (None: it cannot run)."""
        trial = self._open.pop(config)
        if score is None:
            self._prune(trial, "cannot run")
        elif score.fits != "yes":
            trial.set_user_attr("step_time_s", score.step_time_s)
            self._prune(trial, f"memory: {-score.margin_bytes / 2**30:.2f} GiB over", "memory: simulated")
        else:
            trial.set_user_attr("strategy", str(config))
            values = [score.step_time_s, score.worst_row_bytes] if self._two else score.step_time_s
            self.study.tell(trial, values)

    def bound(self) -> float:
        """Return 0: chance proves nothing."""
        return 0.0

    def _prune(self, trial: optuna.trial.Trial, reason: str, count_as: str = "") -> None:
        from optuna.trial import TrialState

        trial.set_user_attr("reason", reason)
        if reason != _AGAIN:
            self.pruned[count_as or reason] = self.pruned.get(count_as or reason, 0) + 1
        self.study.tell(trial, state=TrialState.PRUNED)

    def _draw(self, trial: optuna.trial.Trial) -> tuple[Configuration | None, str]:
        """Return a configuration, and why it is of no use ("" where it is)."""
        space = self.space

        def pick(name: str, values: Sequence[Any], of: str = "") -> Any:
            """Choose among values; equal sets of values are one parameter whatever they depend on."""
            if len(values) < 2:
                return values[0] if values else None
            texts = [_text(value) for value in values]
            key = name if not of else f"{name} of {of}"
            return values[texts.index(trial.suggest_categorical(key, texts))]

        pp, tp, dp, ep, cp, outer = self._degrees[pick("degrees", list(self._degrees))]
        schedule = pick("schedule", list(space.schedules(pp)), f"pp {pp}")
        if schedule is None:
            return None, "no schedule is legal"
        name, v = schedule
        family = FAMILIES[name]
        batches = [(b, m) for b, m in space.batches(dp) if m in family.microbatches(pp, v)]
        zeros = space.zeros(dp * cp, name)
        stages = Configuration(pp, 1, 1, 1, name, v, 0, 1, 1, "none", False, "-").stages
        policies = [*space.recomputes(), *space.counts(stages)]
        cuts, sequence = space.cuts(stages), space.sequence(tp, cp)
        if not (batches and zeros and policies and cuts and sequence):
            return None, "the schedule does not take these numbers"
        b, m = pick("microbatch", batches, f"{batches[0]} to {batches[-1]}")
        zero = pick("zero", zeros, str(len(zeros)))
        policy = pick("recompute", policies, str(len(policies)))
        finer = space.fine(dp * cp, zero, ep, family.layout)
        fine = pick("finer", finer, f"{family.layout}, zero {zero}, dp {dp * cp}, ep {ep}")
        if fine is None:
            return None, "no bucket, prefetch and streams are legal"
        config = Configuration(
            pp, tp, dp, ep, name, v, zero, b, m, policy, pick("sequence", sequence), pick("cuts", cuts), cp, outer,
            bucket=fine[0], prefetch=fine[1], streams=fine[2], order=self._order,
        )  # fmt: skip
        if config in self._seen:
            return config, _AGAIN
        over = self.bounds.memory_floor(config) - self.capacity
        return config, "memory: state and activations" if over > 0 else ""


def forget(journal: Path) -> None:
    """Remove a study, and the lock that Optuna left where it was killed: it would wait for that for half a minute."""
    for path in (journal, *journal.parent.glob(f"{journal.name}.lock*")):
        path.unlink(missing_ok=True)


_AGAIN = "drawn before"


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _study(sampler: Sampler, seed: int, journal: Path | None, name: str) -> optuna.study.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # multivariate TPE, journal storage
        chosen: optuna.samplers.BaseSampler
        match sampler:
            case "tpe":
                chosen = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True)
            case "nsga2":
                chosen = optuna.samplers.NSGAIISampler(seed=seed)
            case "random":
                chosen = optuna.samplers.RandomSampler(seed=seed)
        storage = None
        if journal is not None:
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend

            storage = JournalStorage(JournalFileBackend(str(journal)))
        directions: list[Literal["minimize", "maximize"]] = ["minimize"] * (1 + (sampler == "nsga2"))
        return optuna.create_study(
            study_name=name, storage=storage, sampler=chosen, directions=directions, load_if_exists=True
        )
