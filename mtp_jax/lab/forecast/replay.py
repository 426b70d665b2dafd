"""A load served by an engine in virtual time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mtp_jax.api.admission import Admission, QueueLimits, Reservation
from mtp_jax.engine.config import EngineConfig, EngineOptions
from mtp_jax.engine.defaults import shortened, slots
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.pages import MOST_PAGES
from mtp_jax.engine.request import Request
from mtp_jax.engine.sampling_params import SamplingParams
from mtp_jax.engine.speculation import Speculation
from mtp_jax.engine.stats import EngineStats
from mtp_jax.engine.validate import check_config
from mtp_jax.errors import ConfigError, Overloaded
from mtp_jax.lab.forecast.counted import Counted, Times
from mtp_jax.lab.forecast.load import Arrival
from mtp_jax.lab.planning.deployment import Deployment
from mtp_jax.lab.planning.memory import memory, misfit
from mtp_jax.model.config import ModelConfig


@dataclass(frozen=True)
class Service:
    """An engine to be, and the times of its launches.

    Attributes:
        shards: number of data shards.
        limits: bounds of the queue, as a server has them.
        rates: chance that each draft is accepted, once all before it were; the last holds for all further.
        seed: seed of the drafts that are accepted, and of prompts.
        concurrency: number of requests at a time, of which each arrives as another ends; None: all arrive at
            the times of the load.
    """

    cfg: ModelConfig
    config: EngineConfig
    times: Times
    rates: tuple[float, ...]
    shards: int = 1
    limits: QueueLimits = field(default_factory=QueueLimits)
    seed: int = 0
    concurrency: int | None = None


@dataclass(frozen=True)
class RequestTimes:
    """Times of one request, in seconds.

    Attributes:
        at: seconds from the first arrival to its own.
        waited: seconds from its arrival until it has a slot.
        first: seconds from its arrival to its first token.
        per_token: seconds from token to token after that, on average; None for one token.
        whole: seconds from its arrival to its last token.
    """

    at: float
    waited: float
    first: float
    per_token: float | None
    whole: float


@dataclass(frozen=True)
class Outcome:
    """A load that was served.

    Attributes:
        served: requests in order of arrival.
        refused: number of requests for which the queue had no room.
        cut: number of requests whose output ended at the longest that the engine has room for.
        seconds: seconds from the first arrival to the last token.
        idle: seconds of them in which no program ran.
        speculation: drafts of all requests.
        stats: totals of the engine.
    """

    served: Sequence[RequestTimes]
    refused: int
    cut: int
    seconds: float
    idle: float
    speculation: Speculation
    stats: EngineStats

    @property
    def depth(self) -> float:
        """Drafts of a step, on average."""
        steps = self.stats.depth_steps
        return sum(depth * n for depth, n in steps.items()) / max(steps.total(), 1)


def fitted(config: EngineConfig, base: Deployment, options: EngineOptions) -> EngineConfig:
    """The config with the pages that the deployment's memory holds, and the slots and length for them.

    options: as they were asked for; they stay. Raises ConfigError where the model does not fit.
    """
    check_config(base.cfg, config, base.data)
    own, page, depth = options.max_model_len is None, config.page_size, config.num_speculative_tokens
    context = page if own else config.max_model_len
    d = replace(base, requests=1, context=context, depth=depth, page_size=page)
    if why := misfit(d):
        raise ConfigError(f"{'with' if d.depth else 'without'} drafts {why}")
    room = memory(d)
    if options.max_num_seqs is None:
        config = replace(config, max_num_seqs=slots(config, room.beside(0) // page, d.data))
    pages = min(room.beside(config.max_num_seqs // d.data) // page, MOST_PAGES)
    config = replace(config, num_pages=pages, memory_fraction=None)
    return shortened(config, pages) if own else config


def replay(service: Service, load: Sequence[Arrival]) -> Outcome:
    """Serve a load. Raises ConfigError for a prompt that the engine has no room for.

    All programs are compiled and measured before the first request arrives.
    """
    longest = service.config.longest
    if wrong := next((a for a in load if a.prompt >= longest), None):
        raise ConfigError(
            f"line {wrong.line} of the load: the prompt has {wrong.prompt:,} tokens, a request at most "
            f"{longest:,}; raise --max-model-len, or leave the line out"
        )
    return _Run(service, load).outcome()


class _Run:
    """One engine, and its load."""

    def __init__(self, service: Service, load: Sequence[Arrival]) -> None:
        self._service, self._load, config = service, load, service.config
        given = np.array([_filled(a.rates or service.rates, config.num_speculative_tokens) for a in load])
        self._device = Counted(
            service.times,
            np.cumprod(given, axis=1),
            slots=config.max_num_seqs,
            page_size=config.page_size,
            shards=service.shards,
            seed=service.seed,
        )
        self._engine = Engine(service.cfg, config, self._device)
        self._admission = Admission(service.limits.max_queued_requests, service.limits.max_queued_tokens)
        self._queue: deque[tuple[Request, Reservation]] = deque()
        self._served: list[RequestTimes] = []
        self._speculation = Speculation()
        self._open = self._refused = self._cut = 0

    def outcome(self) -> Outcome:
        """Serve until the load is done."""
        engine, clock = self._engine, self._device.time
        first, rest = engine.warm_up_keys()
        self._device.compile([*first, *rest])
        engine.warm_up([*first, *rest])
        self._began = clock.now
        coming = deque(enumerate(self._load))
        while coming or engine.busy:
            if not engine.busy and self._service.concurrency is None:
                clock.until(self._began + coming[0][1].at)
            while coming and (at := self._due(coming[0][1])) is not None:
                self._submit(*coming.popleft(), at)
            for request in dict.fromkeys(engine.step()):
                if request.finished:
                    self._open -= 1
                    self._speculation += request.progress.speculation
                    self._served.append(self._times(request))
            while self._queue and self._queue[0][0].begun:
                self._admission.release(self._queue.popleft()[1])
        return Outcome(
            sorted(self._served, key=lambda s: s.at),
            self._refused,
            self._cut,
            max(s.at + s.whole for s in self._served),
            self._device.idle,
            self._speculation,
            engine.stats(),
        )

    def _due(self, arrival: Arrival) -> float | None:
        """The time at which a request arrived, on the engine's clock; None: it has not."""
        now, most = self._device.time.now, self._service.concurrency
        if most is not None:
            return now if self._open < most else None
        at = self._began + arrival.at
        return at if at <= now else None

    def _submit(self, index: int, arrival: Arrival, at: float) -> None:
        try:
            reservation = self._admission.reserve(1, arrival.prompt)
        except Overloaded:
            self._refused += 1
            return
        room = self._service.config.longest - arrival.prompt
        self._cut += arrival.output > room
        params = SamplingParams(temperature=0, max_tokens=min(arrival.output, room), ignore_eos=True)
        tokens = arrival.tokens(self._service.cfg.vocab_size, self._service.seed)
        request = self._engine.make_request(tokens, params, seed=index, arrived=at)
        self._engine.submit(request)
        self._open += 1
        self._queue.append((request, reservation))

    def _times(self, request: Request) -> RequestTimes:
        own = request.progress
        assert own.admitted_at is not None
        assert own.first_token_at is not None
        assert own.finished_at is not None
        after = len(own.output) - 1
        return RequestTimes(
            own.arrived - self._began,
            own.admitted_at - own.arrived,
            own.first_token_at - own.arrived,
            (own.finished_at - own.first_token_at) / after if after else None,
            own.finished_at - own.arrived,
        )


def _filled(rates: Sequence[float], drafts: int) -> list[float]:
    """The rates of ``drafts`` drafts: the last rate holds for all further drafts."""
    return [rates[min(k, len(rates) - 1)] for k in range(drafts)]
