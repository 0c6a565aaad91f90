"""Roles of the host model as generators, run in random order: the scheduler, barriers, errors."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator

Wait = tuple[str, Callable[[], bool]]
Agent = Generator[Wait | None, None, None]
STYLES = ("uniform", "speeds", "bursts", "ranked")


class ModelError(AssertionError):
    """A launch broke a rule."""


class DeadlockError(ModelError):
    """Every role that is left waits."""


def check(holds: bool, message: str) -> None:
    if not holds:
        raise ModelError(message)


class Scheduler:
    """Runs agents until all are done.

    uniform: a random ready one takes one step. speeds: so it is, but some are slower than others by
    up to a thousand times. bursts: it takes several. ranked: the ready one of highest priority runs
    until it waits, so that some wait as long as they can.
    """

    def __init__(self, rng: random.Random, style: str):
        self.rng, self.style = rng, style
        self.agents: list[tuple[str, Agent]] = []
        self.waits: dict[Agent, Wait | None] = {}
        self.speeds: dict[Agent, float] = {}

    def start(self, name: str, agent: Agent) -> None:
        self.agents.insert(self.rng.randrange(len(self.agents) + 1), (name, agent))
        self.waits[agent] = None
        self.speeds[agent] = 10 ** -self.rng.uniform(0, 3) if self.style == "speeds" else 1.0

    def _ready(self, index: int) -> bool:
        wait = self.waits[self.agents[index][1]]
        return wait is None or wait[1]()

    def _pick(self) -> int:
        count, first = len(self.agents), 0
        if self.style != "ranked":
            for _ in range(40 if self.style == "speeds" else 8):
                index = self.rng.randrange(count)
                speed = self.speeds[self.agents[index][1]]
                if (speed == 1.0 or self.rng.random() < speed) and self._ready(index):
                    return index
            first = self.rng.randrange(count)
        for offset in range(count):
            index = (first + offset) % count
            if self._ready(index):
                return index
        waits = [f"{name}: {(self.waits[agent] or ('',))[0]}" for name, agent in self.agents]
        raise DeadlockError(f"{count} roles wait: {'; '.join(sorted(waits)[:20])}")

    def run(self) -> None:
        while self.agents:
            index = self._pick()
            name, agent = self.agents[index]
            steps = {"bursts": self.rng.choice((1, 3, 50)), "ranked": 10**9}
            for _ in range(steps.get(self.style, 1)):
                try:
                    self.waits[agent] = wait = next(agent)
                except StopIteration:
                    self.agents.remove((name, agent))
                    break
                if wait is not None and not wait[1]():
                    break


class NamedBarrier:
    """A `bar.sync` id of one block, warpgroups (or roles) as its parties."""

    def __init__(self, parties: int):
        self.parties = parties
        self.arrived: set[int] = set()
        self.rounds = 0

    def arrive(self, who: int) -> None:
        check(who not in self.arrived, f"{who} arrives twice at a barrier")
        self.arrived.add(who)
        if len(self.arrived) == self.parties:
            self.arrived, self.rounds = set(), self.rounds + 1

    def sync(self, who: int) -> Iterator[Wait]:
        rounds = self.rounds
        self.arrive(who)
        yield "named barrier", lambda: self.rounds > rounds
