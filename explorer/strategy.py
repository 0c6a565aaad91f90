"""Which candidates of a cell are timed next: all of them, the best again, or what Optuna suggests.

A strategy hands out batches until it has none. It reads what rows already say (`record.Seen`), so
that a search that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tl_megamoe.schedule import Schedule

from .record import Seen

logger = logging.getLogger(__name__)

STRATEGIES = ("grid", "halving", "optuna")
BATCH = 8
"""Candidates timed in one interleaved round, beside the default and the best so far."""
TRIES = 3
"""Times that a candidate is timed in vain because the default fails beside it."""
KEPT = 3
"""Halving: one candidate in this many goes on to the next rung."""
MAX_IN_VAIN = 40
"""Points in a row that are invalid or known, after which Optuna is not asked for more."""

Look = Callable[[Schedule], Seen | None]


class Strategy(Protocol):
    """Hands out the candidates of one cell."""

    def ask(self) -> list[Schedule]:
        """The next candidates to time, at most `BATCH`; empty when it is done."""


class Grid:
    """Every candidate once, in the model's order; again if the default failed beside it.

    Args:
        schedules: the candidates, the most promising first.
        look: what rows say of a candidate.
    """

    def __init__(self, schedules: Sequence[Schedule], look: Look):
        self.schedules = list(schedules)
        self.look = look

    def ask(self) -> list[Schedule]:
        """See `Strategy`."""
        return [s for s in self.schedules if self._is_open(s)][:BATCH]

    def _is_open(self, schedule: Schedule) -> bool:
        seen = self.look(schedule)
        return seen is None or (seen.ok and not seen.ratios and len(seen.times_us) < TRIES)


class Halving(Grid):
    """Every candidate once, then the best third twice, the best ninth four times, and so on.

    Successive halving (Jamieson and Talwalkar, 2016) with a third kept: a rung ends when each of
    its candidates has its observations, and the medians of their ratios to the default decide who
    goes on. It stops where about as many are left as get confirmed.

    Args:
        schedules: the candidates, the most promising first.
        look: what rows say of a candidate.
        keep: candidates that end it.
    """

    def __init__(self, schedules: Sequence[Schedule], look: Look, keep: int):
        super().__init__(schedules, look)
        self.keep = max(1, keep)

    def ask(self) -> list[Schedule]:
        """See `Strategy`."""
        first = super().ask()
        if first:
            return first
        rung, wanted = ranked(self.schedules, self.look), 2
        while len(rung) > self.keep:
            rung = rung[: max(self.keep, math.ceil(len(rung) / KEPT))]
            short = [s for s in rung if self._is_short(s, wanted)]
            if short:
                return short[:BATCH]
            rung, wanted = ranked(rung, self.look), 2 * wanted
        return []

    def _is_short(self, schedule: Schedule, wanted: int) -> bool:
        """Whether it lacks observations beside the default, and did not try too often."""
        seen = self.look(schedule)
        return seen is None or (len(seen.ratios) < wanted and len(seen.times_us) < 2 * wanted)


def ranked(schedules: Sequence[Schedule], look: Look) -> list[Schedule]:
    """Those that ran beside the default, by `Seen.score`."""
    scores = {s: seen.score for s in schedules if (seen := look(s)) is not None and seen.ranked}
    return sorted(scores, key=lambda s: (scores[s], s.name))


class OptunaSearch:
    """Optuna's tree-structured Parzen estimator over the ranges of a space.

    The first candidates are those that always run (default, classic, frozen); then each trial is a
    point of the space: a value of every range. A point that breaks a rule, failed or has no kernel
    counts as failed. Trials are kept in a journal file, which an interrupted search reads again.

    Args:
        pinned: candidates that run first.
        point_of: a valid schedule from one choice of each range, or None.
        dimensions: range -> its number of values.
        look: what rows say of a candidate.
        trials: candidates in all.
        storage: the journal file.
        study: its study: one cell and kernel.
        seed: of the sampler.

    Attributes:
        known: candidates that were asked for, in this run or an earlier one.

    Raises:
        ValueError: Optuna is not installed.
    """

    def __init__(
        self,
        pinned: Sequence[Schedule],
        point_of: Callable[[dict[str, int]], Schedule | None],
        dimensions: dict[str, int],
        look: Look,
        *,
        trials: int,
        storage: Path,
        study: str,
        seed: int,
    ):
        optuna = import_optuna()
        self._failed = optuna.trial.TrialState.FAIL
        self._pinned = list(pinned)
        self._point_of = point_of
        self._dimensions = dimensions
        self._look = look
        self._trials = trials
        self._asked: list[tuple[Any, Schedule]] = []
        self._dropped: set[Schedule] = set()
        storage.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(storage)
        backend = optuna.storages.journal.JournalFileBackend(str(storage))
        self._study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=study,
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        )
        self.known: dict[Schedule, None] = dict.fromkeys(self._pinned)
        for trial in self._study.trials:  # of an earlier run
            schedule = point_of(dict(trial.params))
            if schedule is None:
                continue
            self.known[schedule] = None
            if trial.state == optuna.trial.TrialState.RUNNING:
                seen = look(schedule)
                if seen is not None and seen.ranked:
                    self._study.tell(trial.number, seen.score)
                else:
                    self._study.tell(trial.number, state=self._failed)
                    self.known.pop(schedule)

    def ask(self) -> list[Schedule]:
        """See `Strategy`; first tells Optuna how the last batch went."""
        self._tell()
        first = [s for s in self._pinned if self._look(s) is None and s not in self._dropped]
        if first:
            return first[:BATCH]
        batch: list[Schedule] = []
        in_vain = 0  # a space may have few valid points, or none that is new
        while len(batch) < BATCH and len(self.known) < self._trials and in_vain < MAX_IN_VAIN:
            in_vain += 1
            trial = self._study.ask()
            choice = {
                name: trial.suggest_categorical(name, list(range(count)))
                for name, count in self._dimensions.items()
            }
            schedule = self._point_of(choice)
            if schedule is None:
                self._study.tell(trial, state=self._failed)
                continue
            in_vain = 0 if schedule not in self.known else in_vain
            self.known[schedule] = None
            self._asked.append((trial, schedule))
            if self._look(schedule) is None and schedule not in batch:
                batch.append(schedule)
            else:
                self._tell()
        return batch

    def _tell(self) -> None:
        """Results of what rows know; a candidate of the batch that is being made waits."""
        waiting = []
        for trial, schedule in self._asked:
            seen = self._look(schedule)
            if seen is None:
                waiting.append((trial, schedule))
            elif seen.ranked:
                self._study.tell(trial, seen.score)
            else:
                self._study.tell(trial, state=self._failed)
        self._asked = waiting

    def drop(self, schedule: Schedule) -> None:
        """A candidate that will get no row, such as one without a kernel: it counts as failed."""
        self._dropped.add(schedule)
        for trial, asked in self._asked:
            if asked == schedule:
                self._study.tell(trial, state=self._failed)
        self._asked = [(t, s) for t, s in self._asked if s != schedule]


def _drop_cut_line(journal: Path) -> None:
    """Cut off the last line of a journal if a crash left a part of it: Optuna reads no further."""
    if not journal.exists():
        return
    with journal.open("rb+") as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            logger.warning("%s: its last line was cut short and is removed", journal)
            file.truncate(end)


def import_optuna() -> Any:
    """Optuna, quiet.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            "--strategy optuna needs Optuna: pip install 'tl_megamoe[optuna]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
