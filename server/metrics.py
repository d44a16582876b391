"""`GET /metrics`: the system's figures for Prometheus. On the event loop of an HTTP worker.

The streamer counts what becomes of requests, the supervisor what becomes of processes; both are asked, so that every
worker gives the same answer. `METRICS` names and explains all that is shown; docs/metrics.md holds the same list.
`/metrics?names=vllm` shows what vLLM shows too under vLLM's names (`server.metrics_vllm`).
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from protocol.figures import Histogram
from protocol.messages import EngineStats, Figures, ModelsState, SystemState
from server.backends import Backends
from server.errors import invalid
from server.metric_families import COUNTER, GAUGE, HISTOGRAM, exposition, family
from server.metrics_vllm import vllm_families

# Name (without the `_total` of counters): type, labels beside `model`, help.
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "callboard_up": (GAUGE, (), "1 while requests can be served, else 0."),
    "callboard_start_time_seconds": (GAUGE, (), "When the server was started, in Unix seconds."),
    "callboard_requests": (
        COUNTER,
        ("outcome", "reason"),
        "Streams that ended or were refused: finished, cancelled, rejected or failed, with the reason or error code.",
    ),
    "callboard_http_requests": (COUNTER, ("method", "path", "status"), "HTTP requests that were answered."),
    "callboard_streams": (GAUGE, ("phase",), "Open streams: tokenizing, waiting, prefilling or running."),
    "callboard_connections": (GAUGE, (), "Clients connected over ZeroMQ, HTTP workers among them."),
    "callboard_generated_tokens": (COUNTER, (), "Tokens generated, as they come."),
    "callboard_prompt_tokens": (COUNTER, (), "Prompt tokens of streams that have ended."),
    "callboard_prompt_tokens_cached": (COUNTER, (), "Those of them that were found in the prefix cache."),
    "callboard_reasoning_tokens": (COUNTER, (), "Reasoning tokens of streams that have ended."),
    "callboard_pooled_texts": (COUNTER, (), "Texts that were embedded or ranked."),
    "callboard_tokenize_seconds": (HISTOGRAM, (), "Template and tokenizing, per stream."),
    "callboard_queue_seconds": (HISTOGRAM, (), "From the tokenized prompt until its prefill begins."),
    "callboard_prefill_seconds": (HISTOGRAM, (), "From the beginning of the prefill to the first token."),
    "callboard_ttft_seconds": (
        HISTOGRAM,
        (),
        "Time to first token, from the arrival of the request until its text is written.",
    ),
    "callboard_received_seconds": (
        HISTOGRAM,
        (),
        "From the arrival of an HTTP request until the streamer has it.",
    ),
    "callboard_itl_seconds": (HISTOGRAM, (), "Inter-token latency: the gaps between the tokens of a stream."),
    "callboard_request_seconds": (HISTOGRAM, (), "From the arrival of a request to its end."),
    "callboard_request_prompt_tokens": (HISTOGRAM, (), "Lengths of prompts."),
    "callboard_request_generated_tokens": (HISTOGRAM, (), "Lengths of finished answers, in tokens."),
    "callboard_rows": (GAUGE, ("state",), "Rows in the engine: waiting, prefilling or running."),
    "callboard_engine_steps": (COUNTER, (), "Turns of the engine that ran the model."),
    "callboard_engine_seconds": (
        COUNTER,
        ("part",),
        "Where the engine's time went: model, python, sockets; and of it committing and restoring prefixes.",
    ),
    "callboard_engine_tokens": (COUNTER, ("kind",), "Tokens the engine has computed: prefill and decode."),
    "callboard_engine_parked": (COUNTER, (), "Rows that were parked for want of memory."),
    "callboard_engine_memory_bytes": (GAUGE, ("kind",), "Memory MLX holds: all of it, and the rows' caches in it."),
    "callboard_prefix_tokens": (
        COUNTER,
        ("source",),
        "Prompt tokens by where their keys and values came from: memory, ssd, computed.",
    ),
    "callboard_prefix_hit_ratio": (GAUGE, (), "Part of all prompt tokens that was found in a tier, since the start."),
    "callboard_prefix_blocks": (GAUGE, (), "Prefix blocks in memory."),
    "callboard_prefix_bytes": (
        GAUGE,
        ("tier",),
        "Bytes of prefix blocks: in memory, on the ssd, waiting to be written.",
    ),
    "callboard_prefix_limit_bytes": (GAUGE, ("tier",), "How many bytes the memory tier and the ssd tier may take."),
    "callboard_prefix_faults": (COUNTER, (), "Prefix blocks that could not be read, or were damaged."),
    "callboard_actor_up": (GAUGE, ("actor",), "1 while the process serves, else 0."),
    "callboard_actor_restarts": (COUNTER, ("actor",), "How often the process was replaced, for whatever reason."),
    "callboard_actor_crashes": (COUNTER, ("actor",), "How often it was replaced because it died or hung."),
    "callboard_actor_memory_bytes": (GAUGE, ("actor",), "Resident memory of the process."),
    "callboard_actor_cpu_seconds": (COUNTER, ("actor",), "CPU time of the process."),
    "callboard_model_state": (
        GAUGE,
        ("state",),
        "With several models: 1 for the state that each is in, unloaded, waiting, loading, ready, unloading or failed.",
    ),
    "callboard_model_loads": (COUNTER, (), "With several models: how often each was loaded."),
    "callboard_model_claim_bytes": (GAUGE, (), "With several models: memory that each may take once it is loaded."),
    "callboard_model_memory_bytes": (GAUGE, (), "With several models: memory of all processes of each."),
    "callboard_model_pinned": (GAUGE, (), "With several models: 1 for those that stay, else 0."),
    "callboard_models_budget_bytes": (GAUGE, (), "With several models: memory for all of them; its `model` is empty."),
    "callboard_malformed_messages": (COUNTER, (), "ZeroMQ messages that could not be read."),
    "callboard_send_faults": (COUNTER, (), "Messages that could not be sent to a client."),
}

STATES = ("unloaded", "waiting", "loading", "ready", "unloading", "failed")

Values = Mapping[tuple[str, ...], float]
ByModel = Mapping[tuple[str, ...], Mapping[str, Values | Histogram]]


def _single(value: float) -> Values:
    return {(): value}


def latest(state: SystemState, figures: Figures) -> EngineStats:
    """What the engine has said last: the streamer hears it with each step, the supervisor also when there is none."""
    return figures.engine if figures.engine.step > state.engine.step else state.engine


def process_values(state: SystemState, serving: bool) -> dict[str, Values | Histogram]:
    """The value of each metric that is about processes, by its labels."""
    actors = [*state.actors, *([state.supervisor] if state.supervisor is not None else [])]
    return {
        "callboard_up": _single(serving),
        "callboard_start_time_seconds": _single(state.started),
        "callboard_http_requests": {tuple(key.split(" ", 2)): count for key, count in state.http.items()},
        "callboard_actor_up": {(a.name,): float(a.state == "ready") for a in actors},
        "callboard_actor_restarts": {(a.name,): a.restarts for a in actors},
        "callboard_actor_crashes": {(a.name,): a.crashes for a in actors},
        "callboard_actor_memory_bytes": {(a.name,): a.memory for a in actors},
        "callboard_actor_cpu_seconds": {(a.name,): a.cpu for a in actors},
    }


def values_of(state: SystemState, figures: Figures | None, serving: bool) -> dict[str, Values | Histogram]:
    """The value of each metric, by its labels. What only the streamer knows is missing without `figures`."""
    engine = state.engine
    found = process_values(state, serving)
    if figures is not None:
        engine = latest(state, figures)
        counts = figures.counts
        phases = dict.fromkeys(("tokenizing", "waiting", "prefilling", "running"), 0) | figures.phases
        found |= {
            "callboard_requests": {tuple(key.split(" ", 1)): count for key, count in counts.requests.items()},
            "callboard_streams": {(phase,): count for phase, count in phases.items()},
            "callboard_connections": _single(figures.connections),
            "callboard_generated_tokens": _single(counts.generated),
            "callboard_prompt_tokens": _single(counts.prompt_tokens),
            "callboard_prompt_tokens_cached": _single(counts.cached_tokens),
            "callboard_reasoning_tokens": _single(counts.reasoning_tokens),
            "callboard_pooled_texts": _single(counts.pooled),
            "callboard_tokenize_seconds": counts.tokenize,
            "callboard_queue_seconds": counts.queue,
            "callboard_prefill_seconds": counts.prefill,
            "callboard_ttft_seconds": counts.ttft,
            "callboard_received_seconds": counts.received,
            "callboard_itl_seconds": counts.itl,
            "callboard_request_seconds": counts.duration,
            "callboard_request_prompt_tokens": counts.prompt_lengths,
            "callboard_request_generated_tokens": counts.answer_lengths,
            "callboard_malformed_messages": _single(counts.malformed),
            "callboard_send_faults": _single(counts.unreachable),
        }
    prefix = engine.prefix
    hits = prefix.memory_tokens + prefix.ssd_tokens
    return found | {
        "callboard_rows": {
            ("waiting",): engine.waiting,
            ("prefilling",): engine.prefilling,
            ("running",): engine.running,
        },
        "callboard_engine_steps": _single(engine.step),
        "callboard_engine_seconds": {
            ("model",): engine.in_model,
            ("python",): engine.in_python,
            ("sockets",): engine.in_sockets,
            ("committing",): prefix.committing,
            ("restoring",): prefix.restoring,
        },
        "callboard_engine_tokens": {("prefill",): engine.prefilled, ("decode",): engine.decoded},
        "callboard_engine_parked": _single(engine.parked),
        "callboard_engine_memory_bytes": {("all",): engine.memory, ("caches",): engine.cache},
        "callboard_prefix_tokens": {
            ("memory",): prefix.memory_tokens,
            ("ssd",): prefix.ssd_tokens,
            ("computed",): prefix.computed_tokens,
        },
        "callboard_prefix_hit_ratio": _single(hits / max(hits + prefix.computed_tokens, 1)),
        "callboard_prefix_blocks": _single(prefix.memory_blocks),
        "callboard_prefix_bytes": {
            ("memory",): prefix.memory_bytes,
            ("ssd",): prefix.ssd_bytes,
            ("queued",): prefix.queued_bytes,
        },
        "callboard_prefix_limit_bytes": {("memory",): prefix.memory_limit, ("ssd",): prefix.ssd_limit},
        "callboard_prefix_faults": _single(prefix.faults),
    }


def model_values(models: ModelsState) -> ByModel:
    """What the house says of each of several models."""
    values: dict[tuple[str, ...], dict[str, Values | Histogram]] = {
        (held.name,): {
            "callboard_model_state": {(state,): float(held.state == state) for state in STATES},
            "callboard_model_loads": _single(held.loads),
            "callboard_model_claim_bytes": _single(held.claim),
            "callboard_model_memory_bytes": _single(held.memory),
            "callboard_model_pinned": _single(held.pinned),
        }
        for held in models.models
    }
    return values | {("",): {"callboard_models_budget_bytes": _single(models.budget)}}


def families(values: Sequence[ByModel]) -> Iterator[Metric]:
    """All metrics of ours. Each of `values` has, by model, values by metric."""
    for name, (kind, own, text) in METRICS.items():
        found = {model: of[name] for one in values for model, of in one.items() if name in of}
        if found:
            yield family(name, kind, text, ("model",), own, found)


class MetricsEndpoint:
    """`GET /metrics`, with `names=vllm` or `names=callboard`."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    async def get(self, request: Request) -> Response:
        """The figures. Raises ApiError for unknown names."""
        names = request.query_params.get("names", "callboard")
        if names not in ("callboard", "vllm"):
            raise invalid("names is callboard or vllm", "names")
        backends = self._backends
        shown = [each for each in backends.all() if backends.house is None or each.state.actors]
        figures = await asyncio.gather(*(each.figures() for each in shown))
        if names == "vllm":
            known = {each.model: found for each, found in zip(shown, figures, strict=True) if found is not None}
            return Response(exposition(vllm_families(known)), media_type=CONTENT_TYPE_LATEST)
        values: list[ByModel] = [
            {
                (each.model,): values_of(each.state, found, each.status in ("ok", "degraded"))
                for each, found in zip(shown, figures, strict=True)
            }
        ]
        if backends.house is not None:
            system = backends.system  # whose casts tell of themselves, with the name of their model
            actors = [actor for actor in system.actors if actor.role != "cast"]
            own = process_values(replace(system, actors=actors), backends.status in ("ok", "degraded"))
            values += [{("",): own}, model_values(backends.models)]
        return Response(exposition(families(values)), media_type=CONTENT_TYPE_LATEST)
