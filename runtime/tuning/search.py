"""The search: candidates race on growing workloads, each against the best so far, so that most are simulated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...conf.tuning import TuneConfig
from .bounds import Bound, Bounds, TokenSeconds
from .capacity import Bracket, Capacity, Interval, capacities
from .demand import Demand, asked_rate, make_demands
from .space import Candidate, Misfit, Space, chunked, policies
from .trial import Trial, measure, try_rate

_FAR_BEHIND = 1 / 16  # of the winner's rate: what carries less carries next to nothing
_GRIDS = 5  # beside the winner's, whose best setting is compared with it on the whole workload,
_OF_GRID = 2  # or the next one, where that carries nothing


@dataclass(frozen=True, slots=True)
class Rung:
    """Candidates of at least the share `keep` of the best one's rate go on; rates are found to within `precision`."""

    name: str
    requests: int
    keep: float
    precision: float


@dataclass(slots=True)
class Tried:
    """What became of a candidate. `low` requests/s it carried, `high` it did not, when they were last found; `why` it
    did not go on. `at` is the trial of `low`."""

    candidate: Candidate
    bound: Bound
    reached: str = ""  # the last rung that it stood on
    rung: str = ""  # the last one on which its rate was found
    low: float = 0.0
    high: float = 0.0
    expected: float = 0.0  # requests/s, of it or of the neighbour that it joined for
    why: str = ""
    at: Trial | None = None
    requests: int = 0  # simulated for it


@dataclass(slots=True)
class Finalist:
    """`capacities` on the whole workload, one a seed; `numbers`: the summary of a run at its rate."""

    candidate: Candidate
    capacities: list[Capacity]
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """On the workload's own seed."""
        return self.capacities[0].rate

    @property
    def interval(self) -> Interval:
        return Interval.of([capacity.rate for capacity in self.capacities])


@dataclass(slots=True)
class Found:
    """All that a search leaves. `finalists` best first; `chunks`: the winner with each chunk, with its capacity;
    `carried`: rates that were carried on the whole workload, of all settings that came so far.

    `simulations` and `requests` are those of the search itself; the curve of chunks and the other seeds are apart.
    """

    tried: list[Tried]
    misfits: list[Misfit]
    finalists: list[Finalist]
    chunks: list[tuple[Candidate, Capacity]]
    carried: list[tuple[Candidate, Trial]]
    demands: list[Demand]
    asked: float | None
    simulations: int
    requests: int
    confirming_requests: int

    @property
    def winner(self) -> Finalist | None:
        """None where no setting meets the SLO at any rate."""
        return self.finalists[0] if self.finalists else None


class Search:
    """Finds the setting of the highest capacity.

    Rungs of growing parts of the workload, with the same requests for all (common random numbers). On each, candidates
    come in the order of what is expected of them; one that does not carry `keep` of the best rate so far is dismissed
    by that one simulation, which stops as soon as its tails are over; one whose bound is below it, by none. After the
    first rung those left are joined by their neighbours in depth, split and B. On the whole workload one must carry
    more than the best to replace it. The finalists get their capacity on all seeds.
    """

    def __init__(self, config: TuneConfig) -> None:
        """
        Raises:
            ConfigError: the workload cannot be read or made, or nothing fits.
        """
        self.config = config
        self.space = Space(config)
        self.simulations = 0
        self.requests = 0
        self.carried: list[tuple[Candidate, Trial]] = []
        self._token_times: TokenSeconds = {}
        # Called with what is under way, how many candidates of how many it has seen, and the best rate so far.
        self.on_progress: Callable[[str, int, int, float], None] = lambda what, done, of, best: None
        tp, pp, replicas = self.space.grids()[0]
        plan = self.space.setting(Candidate(tp, pp, replicas, policies(config)[0])).plan
        context = plan.max_model_len
        if config.cache.num_blocks is not None:
            context = min(context, config.cache.num_blocks * config.cache.block_size)
        self.demands = make_demands(config.workload, plan, context, config.seeds)

    def _bounds(self, demand: Demand) -> Bounds:
        return Bounds(demand, self.config.slo, self._token_times)

    @property
    def demand(self) -> Demand:
        """The whole workload, of its own seed."""
        return self.demands[0]

    def run(self) -> Found:
        tried = self.exhaust() if self.config.search.exhaustive else self.race()
        searched = self.simulations, self.requests
        last = sorted((t for t in tried if t.reached == "whole" and t.low > 0.0), key=_standing)
        finalists = self._confirm(last[: self.config.search.finalists])
        chunks = []
        if finalists:
            if not self.config.search.exhaustive:
                self._best_of_grids(tried, finalists[0])
            chunks = self._chunk_curve(finalists[0])
        return Found(
            tried, self.space.misfits, finalists, chunks, self.carried, self.demands,
            asked_rate(self.config.workload, self.demand), *searched, self.requests - searched[1],
        )  # fmt: skip

    def race(self) -> list[Tried]:
        """All candidates, each as far as it came; those without a `why` stood to the end."""
        precision, num = self.config.precision, len(self.demand)
        first = Rung("first", max(min(num, 60), num // 4), keep=0.75, precision=max(precision, 0.06))
        second = Rung("second", max(min(num, 120), num // 2), keep=0.9, precision=max(precision, 0.03))
        standing = [Tried(candidate, Bound(0.0)) for candidate in self.space.candidates(self.demand)]
        out: list[Tried] = []
        for rung in (first, second, self._last) if second.requests < num else (first, self._last):
            if rung is not first and not any(tried.reached == second.name for tried in standing):
                standing = list(self._with_variants(standing))
            out += self._race(standing, rung)
            standing = [tried for tried in standing if not tried.why]
        return [*self._refine(standing), *out]

    @property
    def _last(self) -> Rung:
        return Rung("whole", len(self.demand), keep=1.0, precision=self.config.precision)

    def _refine(self, standing: Sequence[Tried]) -> list[Tried]:
        """The standing, and the best of them with chunks halfway, in whole tiles, to those that were tried beside its
        own."""
        found = list(standing)
        best = max(found, key=lambda tried: tried.low, default=None)
        own, tile = best.candidate.chunk if best else None, self.config.hardware.tile
        if best is None or own is None:
            return found
        tried_chunks = sorted({own, *self.config.search.chunk})
        place = tried_chunks.index(own)
        for beside in (*tried_chunks[max(0, place - 1) : place], *tried_chunks[place + 1 : place + 2]):
            chunk = round(math.sqrt(own * beside) / tile) * tile
            if not min(own, beside) < chunk < max(own, beside):
                continue
            (policy,) = chunked(best.candidate.policy, [chunk])
            other = Tried(replace(best.candidate, policy=policy), Bound(0.0), reached="whole", expected=best.low)
            other.bound = self._bounds(self.demand)(self.space.setting(other.candidate))
            self._try(other, self.demand, self._last, max(tried.low for tried in found if not tried.why))
            found.append(other)
        most = max(tried.low for tried in found if not tried.why)
        for tried in found:
            if not tried.why and tried.low < most:
                tried.why = f"carries {tried.low:.3g} requests/s, the best {most:.3g}"
        return sorted(found, key=lambda tried: bool(tried.why))

    def exhaust(self) -> list[Tried]:
        """The capacity of every candidate and variant on the whole workload: what the race is measured by."""
        bounds = self._bounds(self.demand)
        found = []
        bases = [Tried(candidate, Bound(0.0)) for candidate in self.space.candidates(self.demand)]
        every = list(self._with_variants(bases))
        best = 0.0
        for number, tried in enumerate(every):
            self.on_progress("every setting", number, len(every), best)
            setting = self.space.setting(tried.candidate)
            tried.bound, tried.rung, tried.reached = bounds(setting), "whole", "whole"
            if tried.bound.rate == 0.0:
                tried.why = tried.bound.why
            else:
                bracket = self._bracket(tried.candidate, self.demand, tried.bound.rate)
                bracket.narrow(self.config.precision)
                tried.low, tried.high, tried.at = bracket.low, bracket.high, bracket.at
                tried.requests = sum(trial.requests for trial in bracket.trials)
                tried.why = "" if tried.low else _reason(bracket)
            best = max(best, tried.low)
            found.append(tried)
        return found

    def _with_variants(self, standing: Sequence[Tried]) -> Iterator[Tried]:
        for tried in standing:
            yield tried
            running = tried.at.running if tried.at is not None else None
            for candidate in self.space.variants(tried.candidate, self.demand, running):
                if candidate != tried.candidate:
                    yield Tried(candidate, tried.bound, expected=tried.expected)

    def _race(self, standing: Sequence[Tried], rung: Rung) -> list[Tried]:
        """One rung; those that it dismisses, with the reason."""
        demand = self.demand.sample(rung.requests)
        bounds = self._bounds(demand)
        for tried in standing:
            tried.bound, tried.reached = bounds(self.space.setting(tried.candidate)), rung.name
        order = sorted(standing, key=lambda tried: (-tried.expected, -self._promise(tried)))
        best = 0.0
        for number, tried in enumerate(order):
            self.on_progress(f"{rung.requests} requests", number, len(order), best)
            self._try(tried, demand, rung, best)
            if not tried.why:
                best = max(best, tried.low)
        self.on_progress(f"{rung.requests} requests", len(order), len(order), best)
        for tried in order:  # the best came later than some
            if not tried.why and tried.high <= rung.keep * best:
                tried.why = f"carries {tried.low:.3g} requests/s, the best {best:.3g}"
        return [tried for tried in order if tried.why]

    def _try(self, tried: Tried, demand: Demand, rung: Rung, best: float) -> None:
        """Its rate, as far as it may be among those that go on."""
        floor, more = rung.keep * best, best * (1 + rung.precision)
        if tried.bound.rate <= floor or not tried.bound.rate:
            tried.why = tried.bound.why or f"can carry at most {tried.bound.rate:.3g} requests/s, the best {best:.3g}"
            tried.high = tried.bound.rate
            return
        bracket = self._bracket(tried.candidate, demand, tried.bound.rate)
        if best == 0.0:
            bracket.climb(tried.expected or tried.bound.rate / 2, 1 + 4 * rung.precision)
        elif rung.keep == 1.0 and not bracket.test(more):
            tried.why = f"not {more:.3g} requests/s, more than the best: {bracket.limit.why if bracket.limit else ''}"
            tried.requests += sum(trial.requests for trial in bracket.trials)
            return
        elif bracket.test(floor) and bracket.test(more):
            bracket.climb(more, 1 + 2 * rung.precision)
        if best == 0.0 or bracket.low > 0.0:
            bracket.narrow(rung.precision)
        tried.rung, tried.low, tried.high, tried.expected = rung.name, bracket.low, bracket.high, bracket.low
        tried.at = bracket.at or tried.at
        tried.requests += sum(trial.requests for trial in bracket.trials)
        if not tried.low:
            tried.why = _reason(bracket)

    def _promise(self, tried: Tried) -> float:
        """Which to try first: the bound, less where a typical micro-batch alone takes longer than TBT may be."""
        bound, most = tried.bound.rate, self.config.slo.tbt_p99_ms
        if most is None or not bound:
            return bound
        tbt = 1e3 * self.space.typical_seconds(tried.candidate, self.demand)
        return bound * min(1.0, (most / tbt) ** 2)

    def _confirm(self, standing: Sequence[Tried]) -> list[Finalist]:
        """The capacity on every seed, and the numbers of a run at it; best first by the mean over the seeds."""
        found: list[Finalist] = []
        for number, tried in enumerate(standing):
            self.on_progress("finalists, all seeds", number, len(standing), found[0].rate if found else tried.low)
            setting = self.space.setting(tried.candidate)
            rates = capacities(
                setting, self.demands, self.config.slo, self.config.precision, guess=tried.low,
                known=self._token_times, told=self._count,
            )  # fmt: skip
            own = rates[0]
            tried.rung, tried.low, tried.high, tried.at = "whole", own.rate, own.above, own.at
            tried.why = own.why
            if own.rate > 0.0:
                numbers = measure(setting, self.demand, own.rate)
                self.carried += [(tried.candidate, trial) for trial in own.trials if trial.carried]
                found.append(Finalist(tried.candidate, rates, numbers))
        return sorted(found, key=lambda finalist: -finalist.interval.mean)

    def _best_of_grids(self, tried: Sequence[Tried], winner: Finalist) -> None:
        """Of the most promising grids the capacity, on the whole workload, of the setting that came furthest."""
        grids: dict[str, list[Tried]] = {}
        for one in sorted(tried, key=lambda t: (t.rung != "whole", -t.expected, -self._promise(t))):
            grids.setdefault(one.candidate.grid, []).append(one)
        grids.pop(winner.candidate.grid, None)
        others = list(grids.values())[:_GRIDS]
        for number, of_grid in enumerate(others):
            self.on_progress("grids", number, len(others), winner.rate)
            for one in of_grid[:_OF_GRID]:
                bound = self._bounds(self.demand)(self.space.setting(one.candidate))
                if bound.rate > 0.0 and one.rung != "whole":
                    precision = max(self.config.precision, 0.05)
                    bracket = self._narrowed(one.candidate, bound.rate, winner.rate, precision, 1 / 4)
                    one.rung, one.low, one.high, one.at = "whole", bracket.low, bracket.high, bracket.at
                    one.why = _reason(bracket)
                if one.low > 0.0:
                    break

    def _narrowed(
        self, candidate: Candidate, bound: float, winner: float, precision: float, least: float = _FAR_BEHIND
    ) -> Bracket:
        """The capacity on the whole workload, where it is more than the share `least` of the winner's."""
        bracket = self._bracket(candidate, self.demand, bound)
        bracket.least = least * winner
        bracket.climb(min(winner, 0.9 * bound), 1.1)
        bracket.narrow(precision)
        return bracket

    def _chunk_curve(self, winner: Finalist) -> list[tuple[Candidate, Capacity]]:
        """The winner with each chunk: its capacity on the whole workload."""
        if winner.candidate.chunk is None:
            return []
        bounds = self._bounds(self.demand)
        curve = []
        chunks = sorted({*self.config.search.chunk, winner.candidate.chunk})
        versions = chunked(winner.candidate.policy, chunks)
        for number, version in enumerate(versions):
            self.on_progress("chunk sizes", number, len(versions), winner.rate)
            candidate = replace(winner.candidate, policy=version)
            if candidate == winner.candidate:
                curve.append((candidate, winner.capacities[0]))
                continue
            bound = bounds(self.space.setting(candidate))
            if bound.rate == 0.0:
                curve.append((candidate, Capacity(0.0, 0.0, None, Trial(0.0, bound.why, 0))))
                continue
            bracket = self._narrowed(candidate, bound.rate, winner.rate, self.config.precision)
            curve.append((candidate, bracket.capacity()))
        return curve

    def _bracket(self, candidate: Candidate, demand: Demand, bound: float) -> Bracket:
        setting = self.space.setting(candidate)

        def attempt(rate: float) -> Trial:
            trial = try_rate(setting, demand, rate, self.config.slo)
            self._count(trial)
            if trial.carried and demand is self.demand:
                self.carried.append((candidate, trial))
            return trial

        return Bracket(attempt, bound)

    def _count(self, trial: Trial) -> None:
        self.simulations += 1
        self.requests += trial.requests


def _standing(tried: Tried) -> tuple[bool, bool, float]:
    """Finalists first: those that carried more than all before them on the whole workload, the last of them ahead."""
    return bool(tried.why), tried.rung != "whole", -tried.low


def _reason(bracket: Bracket) -> str:
    """Why the lowest rate that is known not to be carried is not."""
    if bracket.limit is None:
        return "no rate is carried"
    return f"{bracket.limit.why} at {bracket.limit.rate:.3g} requests/s"
