"""What of our figures vLLM shows with the same meaning, under vLLM's names. Used by `server.metrics`."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from protocol.figures import Histogram
from protocol.messages import Figures
from server.metric_families import COUNTER, GAUGE, HISTOGRAM, family

Row = tuple[str, str, str, tuple[str, ...], object]


def vllm_families(figures: Mapping[str, Figures]) -> Iterator[Metric]:
    """The metrics of each model, with vLLM's labels `model_name` and `engine`."""
    tables = {(model, "0"): _rows(one) for model, one in figures.items()}
    for same in zip(*tables.values(), strict=True):
        name, kind, text, own, _ = same[0]
        values: dict[tuple[str, ...], object] = {
            labels: value if isinstance(value, Histogram | dict) else {(): value}
            for labels, (*_, value) in zip(tables, same, strict=True)
        }
        yield family(f"vllm:{name}", kind, text, ("model_name", "engine"), own, values)


def _rows(figures: Figures) -> list[Row]:
    counts, engine, prefix = figures.counts, figures.engine, figures.engine.prefix
    hits = prefix.memory_tokens + prefix.ssd_tokens
    finished: dict[tuple[str, ...], int] = {}
    for key, count in counts.requests.items():
        outcome, reason = key.split(" ", 1)
        if outcome in ("finished", "cancelled"):
            reason = {"cancelled": "abort", "tool_calls": "stop"}.get(reason, reason)
            finished[(reason,)] = finished.get((reason,), 0) + count
    return [
        ("num_requests_running", GAUGE, "Rows in the batch.", (), engine.running + engine.prefilling),
        ("num_requests_waiting", GAUGE, "Rows that wait.", (), engine.waiting),
        ("num_preemptions", COUNTER, "Rows parked for want of memory.", (), engine.parked),
        ("prompt_tokens", COUNTER, "Prompt tokens processed.", (), hits + prefix.computed_tokens),
        ("generation_tokens", COUNTER, "Tokens generated.", (), counts.generated),
        ("prefix_cache_queries", COUNTER, "Prompt tokens looked up.", (), hits + prefix.computed_tokens),
        ("prefix_cache_hits", COUNTER, "Prompt tokens found.", (), hits),
        ("request_success", COUNTER, "Requests that ended.", ("finished_reason",), finished),
        ("time_to_first_token_seconds", HISTOGRAM, "Time to first token.", (), counts.ttft),
        ("inter_token_latency_seconds", HISTOGRAM, "Gaps between tokens.", (), counts.itl),
        ("e2e_request_latency_seconds", HISTOGRAM, "Arrival to end.", (), counts.duration),
        ("request_queue_time_seconds", HISTOGRAM, "Time in the queue.", (), counts.queue),
        ("request_prefill_time_seconds", HISTOGRAM, "Time of the prefill.", (), counts.prefill),
        ("request_prompt_tokens", HISTOGRAM, "Lengths of prompts.", (), counts.prompt_lengths),
        ("request_generation_tokens", HISTOGRAM, "Lengths of answers.", (), counts.answer_lengths),
    ]
