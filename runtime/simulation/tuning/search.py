"""The search for the setting with the highest capacity: candidates race on growing parts of the workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....conf.tuning import TuneConfig
from ...core.run_record import RunRecord
from ..pipeline.run import simulated
from .bounds import Bound, Bounds, TokenSeconds
from .capacity import Bracket, Capacity, SeededCapacities, make_bracket
from .closest import Approach, closest
from .demand import Demand, asked_rate, make_demands
from .error_range import error_range
from .paired import compare
from .search_result import Finalist, SearchResult, TriedCandidate
from .space import Candidate, Space, chunked
from .trial import Trial, try_rate

# Called with the activity, the number of candidates done, their total, and the best rate in requests/s.
OnProgress = Callable[[str, int, int, float], None]
Summarize = Callable[[Sequence[RunRecord]], dict[str, Any]]  # records of a fleet -> the numbers of `summary.json`

_NEGLIGIBLE = 1 / 16  # share of the winner's rate below which no rate is tried
_MAX_GRIDS = 5  # grids that are compared with the winner's on the whole workload
_TRIES_PER_GRID = 2  # settings of such a grid that are tried at most, until one carries a rate


@dataclass(frozen=True, slots=True)
class Rung:
    """One round of the race, on a part of the workload.

    Attributes:
        name: Its name.
        requests: How many of the workload's requests it simulates.
        keep: Candidates with a rate above this share of the best rate advance.
        precision: Rates are found to within this share.
    """

    name: str
    requests: int
    keep: float
    precision: float


class Search:
    """Finds the setting with the highest capacity.

    Candidates race on rungs: growing parts of the workload, with the same requests for all (common random numbers).

    - On a rung, candidates run in descending order of their expected rate. One that does not carry the share
      `keep` of the best rate so far leaves the race.
    - Most leave after one simulation, which stops as soon as its tails are too long. A candidate whose bound is too low
      leaves without one.
    - After the first rung, the remaining candidates are joined by their neighbours in depth, layer split and B.
    - On the last rung, the whole workload, a candidate must carry more than the best to replace it.

    The finalists are then compared on the same seeds, with more seeds while they are tied.
    """

    def __init__(self, config: TuneConfig) -> None:
        """Prepare the search; simulates nothing.

        Args:
            config: The model, the devices, the workload, the SLO and the search space.

        Raises:
            ConfigError: The workload is not valid, or no grid can hold the model.
        """
        self.config = config
        self.space = Space(config)
        self.simulations = 0
        self.requests = 0
        self.carried: list[tuple[Candidate, Trial]] = []
        self._token_times: TokenSeconds = {}
        self._whole_loops: dict[Candidate, Trial] = {}  # closed-loop trials on the whole workload
        self.summarize: Summarize = lambda records: {}  # makes the numbers of each finalist
        self.on_progress: OnProgress = lambda activity, done, total, best: None  # called as the search advances
        tp, pp, replicas = self.space.grids()[0]
        plan = self.space.setting(self.space.first(tp, pp, replicas)).plan
        self.demands = make_demands(config.workload, plan, plan.room, config.seeds, config.most_seeds - config.seeds)

    @property
    def demand(self) -> Demand:
        """The whole workload, with its own seed."""
        return self.demands[0]

    def run(self) -> SearchResult:
        """Search, confirm the finalists on all seeds, and measure the winner with each chunk."""
        exhaustive = self.config.search.exhaustive
        tried = self.exhaust() if exhaustive else self.race()
        simulations, requests = self.simulations, self.requests
        carrying = sorted((t for t in tried if t.reached == "whole" and t.low > 0.0), key=_finalists_first)
        finalists = self._confirm(carrying[: self.config.search.finalists])
        chunks = []
        if finalists:
            if not exhaustive:
                self._measure_other_grids(tried, finalists[0])
            chunks = self._measure_chunks(finalists[0])
        near = [] if finalists else self._closest(tried)
        return SearchResult(
            tried=tried,
            misfits=self.space.misfits,
            finalists=finalists,
            chunks=chunks,
            carried=self.carried,
            demands=self.demands,
            asked=asked_rate(self.config.workload, self.demand),
            simulations=simulations,
            requests=requests,
            confirming_requests=self.requests - requests,
            error=self.space.setting(tried[0].candidate).error if tried else None,
            closest=near,
        )

    def race(self) -> list[TriedCandidate]:
        """Race all candidates. Returns the remaining ones, without a `why`, and then those that left."""
        remaining = [TriedCandidate(candidate, Bound(0.0)) for candidate in self.space.candidates(self.demand)]
        left: list[TriedCandidate] = []
        for number, rung in enumerate(self._rungs()):
            if number == 1:
                remaining = list(self._with_variants(remaining))
            left += self._race_on(rung, remaining)
            remaining = [tried for tried in remaining if not tried.why]
        return [*self._refine_chunk(remaining), *left]

    def _rungs(self) -> list[Rung]:
        """Return rungs of about a quarter, a half and all of the workload; a small workload has no half."""
        precision, num = self.config.precision, len(self.demand)
        first = Rung("first", max(min(num, 60), num // 4), keep=0.75, precision=max(precision, 0.06))
        second = Rung("second", max(min(num, 120), num // 2), keep=0.9, precision=max(precision, 0.03))
        return [first, second, self._last_rung] if second.requests < num else [first, self._last_rung]

    @property
    def _last_rung(self) -> Rung:
        return Rung("whole", len(self.demand), keep=1.0, precision=self.config.precision)

    def _with_variants(self, remaining: Sequence[TriedCandidate]) -> Iterator[TriedCandidate]:
        """Yield each candidate, then its neighbours in depth, layer split and B, which are expected to do as well."""
        for tried in remaining:
            yield tried
            running = tried.low_trial.running if tried.low_trial is not None else None
            for candidate in self.space.variants(tried.candidate, self.demand, running):
                if candidate != tried.candidate:
                    yield TriedCandidate(candidate, tried.bound, expected=tried.expected)

    def _race_on(self, rung: Rung, remaining: Sequence[TriedCandidate]) -> list[TriedCandidate]:
        """Race candidates on one rung. Returns those that leave; their `why` gives the reason."""
        is_timed = self.config.workload.duration_s is not None
        demand = self.demand if is_timed else self.demand.sample(rung.requests)
        bounds = self._bounds(demand)
        for tried in remaining:
            tried.bound, tried.reached = bounds(self.space.setting(tried.candidate)), rung.name
        order = sorted(remaining, key=lambda tried: (-tried.expected, -self._promise(tried)))
        best = 0.0
        for number, tried in enumerate(order):
            self.on_progress(f"{rung.requests} requests", number, len(order), best)
            self._find_rate(tried, demand, rung, best)
            if not tried.why:
                best = max(best, tried.low)
        self.on_progress(f"{rung.requests} requests", len(order), len(order), best)
        for tried in order:  # drop those that ran before the best one
            if not tried.why and tried.high <= rung.keep * best:
                tried.why = f"carries {tried.low:.3g} requests/s, the best {best:.3g}"
        return [tried for tried in order if tried.why]

    def _find_rate(self, tried: TriedCandidate, demand: Demand, rung: Rung, best: float) -> None:
        """Find a candidate's rate on a rung, or that it is too low to advance.

        Args:
            tried: The candidate; gets its rate, or the reason why it leaves.
            demand: The rung's part of the workload.
            rung: The rung.
            best: The best rate on this rung so far, in requests/s; 0 for the first candidate.
        """
        enough, more = rung.keep * best, best * (1 + rung.precision)
        if tried.bound.rate <= enough or not tried.bound.rate:
            tried.why = tried.bound.why or f"can carry at most {tried.bound.rate:.3g} requests/s, the best {best:.3g}"
            tried.high = tried.bound.rate
            return
        bracket = self._bracket(tried.candidate, demand, tried.bound.rate)
        if best == 0.0:
            bracket.climb(tried.expected or tried.bound.rate / 2, 1 + 4 * rung.precision)
        elif rung.keep == 1.0 and not bracket.test(more):
            limit = bracket.high_trial.why if bracket.high_trial else ""
            tried.why = f"does not carry {more:.3g} requests/s, which would beat the best: {limit}"
            tried.requests += sum(trial.requests for trial in bracket.trials)
            return
        elif bracket.test(enough) and bracket.test(more):
            bracket.climb(more, 1 + 2 * rung.precision)
        if best == 0.0 or bracket.low > 0.0:
            bracket.narrow(rung.precision)
        tried.rung, tried.low, tried.high, tried.expected = rung.name, bracket.low, bracket.high, bracket.low
        tried.low_trial = bracket.low_trial or tried.low_trial
        tried.requests += sum(trial.requests for trial in bracket.trials)
        if not tried.low:
            tried.why = _limit_text(bracket)

    def _promise(self, tried: TriedCandidate) -> float:
        """Return a rate that orders candidates before they have run: the bound, lowered if TBT is likely to be missed.

        TBT is likely to be missed if a typical micro-batch alone takes longer than the SLO.
        """
        bound, tbt_slo = tried.bound.rate, self.config.slo.tbt_p99_ms
        if tbt_slo is None or not bound:
            return bound
        tbt = 1e3 * self.space.typical_seconds(tried.candidate, self.demand)
        return bound * min(1.0, (tbt_slo / tbt) ** 2)

    def _refine_chunk(self, remaining: Sequence[TriedCandidate]) -> list[TriedCandidate]:
        """Try the best candidate with chunks between its own and the next smaller and larger ones.

        Returns the remaining candidates and the new ones. Only the best has no `why`.
        """
        found = list(remaining)
        best = max(found, key=lambda tried: tried.low, default=None)
        own, tile = best.candidate.chunk if best else None, self.config.hardware.tile
        if best is None or own is None:
            return found
        tried_chunks = sorted({own, *self.config.search.chunk})
        place = tried_chunks.index(own)
        for neighbour in (*tried_chunks[max(0, place - 1) : place], *tried_chunks[place + 1 : place + 2]):
            chunk = round(math.sqrt(own * neighbour) / tile) * tile
            if not min(own, neighbour) < chunk < max(own, neighbour):
                continue
            (policy,) = chunked(best.candidate.policy, [chunk])
            other = TriedCandidate(
                replace(best.candidate, policy=policy), Bound(0.0), reached="whole", expected=best.low
            )
            other.bound = self._bounds(self.demand)(self.space.setting(other.candidate))
            self._find_rate(other, self.demand, self._last_rung, max(tried.low for tried in found if not tried.why))
            found.append(other)
        highest = max(tried.low for tried in found if not tried.why)
        for tried in found:
            if not tried.why and tried.low < highest:
                tried.why = f"carries {tried.low:.3g} requests/s, the best {highest:.3g}"
        return sorted(found, key=lambda tried: bool(tried.why))

    def exhaust(self) -> list[TriedCandidate]:
        """Find the capacity of every candidate and variant on the whole workload, for comparison with the race."""
        bounds = self._bounds(self.demand)
        bases = [TriedCandidate(candidate, Bound(0.0)) for candidate in self.space.candidates(self.demand)]
        found = list(self._with_variants(bases))
        best = 0.0
        for number, tried in enumerate(found):
            self.on_progress("every setting", number, len(found), best)
            setting = self.space.setting(tried.candidate)
            tried.bound, tried.rung, tried.reached = bounds(setting), "whole", "whole"
            if tried.bound.rate == 0.0:
                tried.why = tried.bound.why
            else:
                bracket = self._bracket(tried.candidate, self.demand, tried.bound.rate)
                bracket.narrow(self.config.precision)
                tried.low, tried.high, tried.low_trial = bracket.low, bracket.high, bracket.low_trial
                tried.requests = sum(trial.requests for trial in bracket.trials)
                tried.why = "" if tried.low else _limit_text(bracket)
            best = max(best, tried.low)
        return found

    def _confirm(self, candidates: Sequence[TriedCandidate]) -> list[Finalist]:
        """Compare candidates on the same seeds, and run each at its capacity. The preferred one comes first."""

        def count(number: int, trial: Trial) -> None:
            self._count(trial)
            seed = len(by_seed.found[number]) + 1
            self.on_progress(f"finalists, seed {seed}", number, len(candidates), candidates[0].low)

        by_seed = SeededCapacities(
            [self.space.setting(tried.candidate) for tried in candidates],
            self.demands,
            self.config.slo,
            self.config.precision,
            guesses=[tried.low for tried in candidates],
            token_times=self._token_times,
            on_trial=count,
        )
        kept = []
        for number, tried in enumerate(candidates):
            own = by_seed(number, 0)
            tried.rung, tried.low, tried.high, tried.low_trial = "whole", own.rate, own.above, own.trial
            tried.why = own.why
            if own.rate > 0.0:
                self.carried += [(tried.candidate, trial) for trial in own.trials if trial.carried]
                kept.append(number)
        if not kept:
            return []
        compared = compare(
            lambda place, seed: by_seed.rate(kept[place], seed),
            len(kept),
            most=len(self.demands),
            least=min(self.config.seeds, len(self.demands)),
            resolution=self.config.precision,
        )
        found: list[Finalist] = []
        for place in compared.order(lambda place: candidates[kept[place]].candidate.simplicity):
            number, verdict = kept[place], compared.verdicts[place]
            candidate, own = candidates[number].candidate, by_seed(number, 0)
            if verdict in ("tie", "equal"):
                candidates[number].why = f"statistically tied with the best; {own.why}"
            setting, capacities = self.space.setting(candidate), by_seed.found[number]
            self.on_progress("if stage times are off", len(found), len(kept), own.rate)
            off = error_range(
                setting,
                self.demand,
                self.config.slo,
                capacities,
                self.config.precision,
                token_times=self._token_times,
                on_trial=self._count,
            )
            found.append(
                Finalist(
                    candidate=candidate,
                    capacities=capacities,
                    behind=compared.differences[place],
                    verdict=verdict,
                    off=off,
                    numbers=self.summarize([r.record for r in simulated(setting, self.demand.at(own.rate))]),
                )
            )
        return found

    def _closest(self, tried: Sequence[TriedCandidate]) -> list[Approach]:
        """Return the settings that come closest to the SLO."""
        self.on_progress("which setting comes closest", 0, 1, 0.0)
        settings = {one.candidate.label: self.space.setting(one.candidate) for one in tried}
        return closest(settings, self.demand, self.config.slo, self._bounds(self.demand), self._count)

    def _measure_other_grids(self, tried: Sequence[TriedCandidate], winner: Finalist) -> None:
        """Find the capacity of the best setting of each of the most promising other grids, on the whole workload."""
        by_grid: dict[str, list[TriedCandidate]] = {}
        for one in sorted(tried, key=lambda t: (t.rung != "whole", -t.expected, -self._promise(t))):
            by_grid.setdefault(one.candidate.grid, []).append(one)
        by_grid.pop(winner.candidate.grid, None)
        grids = list(by_grid.values())[:_MAX_GRIDS]
        for number, of_grid in enumerate(grids):
            self.on_progress("grids", number, len(grids), winner.rate)
            for one in of_grid[:_TRIES_PER_GRID]:
                bound = self._bounds(self.demand)(self.space.setting(one.candidate))
                if bound.rate > 0.0 and one.rung != "whole":
                    precision = max(self.config.precision, 0.05)
                    bracket = self._capacity_beside(winner.rate, one.candidate, bound.rate, precision, 1 / 4)
                    one.rung, one.low, one.high, one.low_trial = "whole", bracket.low, bracket.high, bracket.low_trial
                    one.why = _limit_text(bracket)
                if one.low > 0.0:
                    break

    def _measure_chunks(self, winner: Finalist) -> list[tuple[Candidate, Capacity]]:
        """Find the capacity of the winner with each chunk, on the whole workload."""
        if winner.candidate.chunk is None:
            return []
        bounds = self._bounds(self.demand)
        found = []
        chunks = sorted({*self.config.search.chunk, winner.candidate.chunk})
        versions = chunked(winner.candidate.policy, chunks)
        for number, version in enumerate(versions):
            self.on_progress("chunk sizes", number, len(versions), winner.rate)
            candidate = replace(winner.candidate, policy=version)
            if candidate == winner.candidate:
                found.append((candidate, winner.capacities[0]))
                continue
            bound = bounds(self.space.setting(candidate))
            if bound.rate == 0.0:
                found.append((candidate, Capacity(0.0, 0.0, None, Trial(0.0, bound.why, 0))))
                continue
            bracket = self._capacity_beside(winner.rate, candidate, bound.rate, self.config.precision)
            found.append((candidate, bracket.capacity()))
        return found

    def _capacity_beside(
        self, winner: float, candidate: Candidate, bound: float, precision: float, lowest: float = _NEGLIGIBLE
    ) -> Bracket:
        """Find a capacity on the whole workload, starting at the winner's rate.

        Args:
            winner: The winner's rate, in requests/s.
            candidate: The candidate.
            bound: Its bound, in requests/s.
            precision: The capacity is found to within this share.
            lowest: Share of the winner's rate below which no rate is tried.
        """
        bracket = self._bracket(candidate, self.demand, bound)
        bracket.lowest = lowest * winner
        bracket.climb(min(winner, 0.9 * bound), 1.1)
        bracket.narrow(precision)
        return bracket

    def _bounds(self, demand: Demand) -> Bounds:
        return Bounds(demand, self.config.slo, self._token_times)

    def _bracket(self, candidate: Candidate, demand: Demand, bound: float) -> Bracket:
        """Make a bracket for a candidate's capacity; its trials are counted."""
        setting = self.space.setting(candidate)

        def attempt(rate: float) -> Trial:
            if candidate in self._whole_loops and demand is self.demand:
                return self._whole_loops[candidate]
            trial = try_rate(setting, demand, rate, self.config.slo)
            self._count(trial)
            if demand is self.demand and demand.clients is not None:
                self._whole_loops[candidate] = trial
            if trial.carried and demand is self.demand:
                self.carried.append((candidate, trial))
            return trial

        return make_bracket(attempt, bound, demand)

    def _count(self, trial: Trial) -> None:
        self.simulations += 1
        self.requests += trial.requests


def _finalists_first(tried: TriedCandidate) -> tuple[bool, bool, float]:
    """Order candidates: those still in the race first, then those with a rate on the whole workload, by that rate."""
    return bool(tried.why), tried.rung != "whole", -tried.low


def _limit_text(bracket: Bracket) -> str:
    """Return why the lowest failed rate was not carried."""
    if bracket.high_trial is None:
        return "no rate is carried"
    return f"{bracket.high_trial.why} at {bracket.high_trial.rate:.3g} requests/s"
