"""What of our figures vLLM shows with the same meaning, under vLLM's names. Used by `server.metrics`."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from protocol.figures import Histogram
from protocol.messages import Figures
from server.metric_families import COUNTER, GAUGE, HISTOGRAM, family


def vllm_families(figures: Figures, model: str) -> Iterator[Metric]:
    """The metrics, each with vLLM's labels `model_name` and `engine`."""
    counts, engine, prefix = figures.counts, figures.engine, figures.engine.prefix
    hits = prefix.memory_tokens + prefix.ssd_tokens
    finished: dict[tuple[str, ...], int] = {}
    for key, count in counts.requests.items():
        outcome, reason = key.split(" ", 1)
        if outcome in ("finished", "cancelled"):
            reason = {"cancelled": "abort", "tool_calls": "stop"}.get(reason, reason)
            finished[(reason,)] = finished.get((reason,), 0) + count
    rows: list[tuple[str, str, str, tuple[str, ...], object]] = [
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
    labels = {"model_name": model, "engine": "0"}
    for name, kind, text, own, value in rows:
        values = value if isinstance(value, Histogram | dict) else {(): value}
        yield family(f"vllm:{name}", kind, text, labels, own, values)
