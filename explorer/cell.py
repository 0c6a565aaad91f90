"""The cells of a search: a token count and a routing, with its candidates and their builds."""

from __future__ import annotations

from dataclasses import dataclass, field

from tl_megamoe.schedule import Schedule

from .farm import BuildResult


@dataclass(slots=True)
class Cell:
    """The candidates of one token count and routing, with their compile results as they come.

    Attributes:
        num_tokens: tokens a rank contributes.
        routing: as tables name it.
        source: as the bench takes it: a file by its path.
        schedules: candidates, the model's best first.
        baseline: the built-in default, which runs in every round.
        pinned: candidates that are always confirmed: the default and the frozen schedule.
        builds: results of the compile farm.
    """

    num_tokens: int
    schedules: list[Schedule]
    baseline: Schedule
    routing: str = "uniform"
    source: str = "uniform"
    pinned: tuple[Schedule, ...] = ()
    builds: dict[Schedule, BuildResult] = field(default_factory=dict)

    def can_run(self, schedule: Schedule) -> bool:
        """Whether its kernel is built."""
        build = self.builds.get(schedule)
        return build is not None and build.status == "ok"

    @property
    def label(self) -> str:
        """For progress and messages."""
        routing = "" if self.routing == "uniform" else f", {self.routing}"
        return f"{self.num_tokens} tokens{routing}"
