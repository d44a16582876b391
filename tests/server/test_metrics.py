"""`GET /metrics`: names, values, what docs/metrics.md says of them, and what promtool says of their form."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from http_worker import HttpWorker, chat
from prometheus_client.parser import text_string_to_metric_families

from protocol.figures import Counts, Histogram
from protocol.messages import ActorState, EngineStats, Figures, ModelsState, ModelState, PrefixStats, SystemState
from server.metric_families import COUNTER, HISTOGRAM, exposition
from server.metrics import METRICS, families, model_values, process_values, values_of
from server.metrics_vllm import vllm_families

ROOT = Path(__file__).parents[2]
TIMES = Histogram([0.1, 1.0], [2, 1, 1], 5.5)
FIGURES = Figures(
    1,
    Counts(
        {"finished stop": 3, "finished tool_calls": 1, "rejected queue_full": 2, "cancelled cancelled": 1},
        70,
        ttft=TIMES,
    ),
    EngineStats(step=9, running=2, prefilling=1, waiting=4, prefix=PrefixStats(30, 10, 60)),
    {"running": 3},
)
STATE = SystemState(
    "ok",
    "tiny",
    [ActorState("engine", "engine", 0, 12, "ready", 4, "", 1000, 2.5, 3, 2)],
    http={"POST /v1/chat/completions 200": 4},
    supervisor=ActorState("supervisor", "supervisor", 0, 11, "ready", 0),
    started=1.7e9,
)


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and labels, those of model and engine aside."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            labels = tuple(v for k, v in sample.labels.items() if k not in ("model", "model_name", "engine"))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def shown(figures: Figures | None = FIGURES) -> str:
    return exposition(families([{("tiny",): values_of(STATE, figures, True)}])).decode()


def test_what_was_counted_is_shown():
    found = samples(shown())
    assert found["callboard_requests_total"][("rejected", "queue_full")] == 2
    assert found["callboard_http_requests_total"] == {("POST", "/v1/chat/completions", "200"): 4}
    assert found["callboard_streams"] == {("tokenizing",): 0, ("waiting",): 0, ("prefilling",): 0, ("running",): 3}
    assert found["callboard_generated_tokens_total"] == {(): 70}
    assert found["callboard_prefix_hit_ratio"] == {(): 0.4}
    assert found["callboard_actor_crashes_total"] == {("engine",): 2, ("supervisor",): 0}
    assert found["callboard_ttft_seconds_bucket"] == {("0.1",): 2, ("1.0",): 3, ("+Inf",): 4}
    assert found["callboard_ttft_seconds_sum"] == {(): 5.5}
    assert found["callboard_itl_seconds_count"] == {(): 0}


def test_without_the_streamer_the_others_are_still_shown():
    found = samples(shown(None))
    assert found["callboard_actor_memory_bytes"][("engine",)] == 1000
    assert "callboard_requests_total" not in found


def several() -> str:
    """What a house of two models shows, one of which is loaded."""
    loaded = {("tiny",): values_of(STATE, FIGURES, True)}
    own = {("",): process_values(STATE, True)}
    held = [ModelState("tiny", "ready", loads=2, memory=7, pinned=True), ModelState("other", "waiting", claim=5)]
    return exposition(families([loaded, own, model_values(ModelsState(held, 9))])).decode()


def test_several_models_have_figures_each():
    text = several()
    assert text.count("# TYPE callboard_up gauge") == 1
    assert 'callboard_up{model="tiny"} 1.0' in text
    assert 'callboard_up{model=""} 1.0' in text
    assert 'callboard_model_state{model="other",state="waiting"} 1.0' in text
    assert 'callboard_model_state{model="tiny",state="waiting"} 0.0' in text
    assert 'callboard_model_loads_total{model="tiny"} 2.0' in text
    assert 'callboard_models_budget_bytes{model=""} 9.0' in text
    assert text.count("callboard_generated_tokens_total{") == 1
    vllm = exposition(vllm_families({"tiny": FIGURES, "other": FIGURES})).decode()
    assert vllm.count("vllm:generation_tokens_total{") == 2


def test_vllms_names():
    found = samples(exposition(vllm_families({"tiny": FIGURES})).decode())
    assert found["vllm:request_success_total"] == {("stop",): 4, ("abort",): 1}
    assert found["vllm:num_requests_running"] == {(): 3}
    assert found["vllm:prefix_cache_hits_total"] == {(): 40}
    assert found["vllm:time_to_first_token_seconds_count"] == {(): 4}


def test_a_worker_serves_them(worker: HttpWorker):
    worker.streamer.figures = FIGURES
    worker.client.post("/v1/chat/completions", json=chat())
    worker.client.get("/v1/models/other")
    answer = worker.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert samples(answer.text)["callboard_generated_tokens_total"] == {(): 70}
    assert "vllm:generation_tokens_total" in worker.client.get("/metrics?names=vllm").text
    assert worker.client.get("/metrics?names=other").status_code == 400
    told = worker.supervisor.probe().http
    assert told["POST /v1/chat/completions 200"] >= 1
    assert told["GET /v1/models/{name} 404"] == 1


def test_the_documentation_names_every_metric():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(callboard_\w+)` \| (.*) \|$", text, re.MULTILINE))
    for name, (kind, labels, about) in METRICS.items():
        full = f"{name}_total" if kind == COUNTER else name
        assert rows.pop(full) == f"{kind} | {', '.join(labels) or ' '} | {about}".replace("  ", " "), full
    assert rows == {}


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "monitoring").glob("*.*")), ids=lambda path: path.name)
def test_examples_use_metrics_that_exist(path: Path):
    known = {"callboard_requests", "callboard_http_requests"}
    for name, (kind, _, _) in METRICS.items():
        ends = ("_bucket", "_sum", "_count") if kind == HISTOGRAM else ("_total",) if kind == COUNTER else ("",)
        known |= {name + end for end in ends}
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        json.loads(text)
    used = set(re.findall(r"\bcallboard_\w+", text))
    assert used
    assert used <= known


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing():
    for text in (shown(), several(), exposition(vllm_families({"tiny": FIGURES, "other": FIGURES})).decode()):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("vllm:")]
        assert lines == []
    rules = ROOT / "examples" / "monitoring" / "alerts.yml"
    done = subprocess.run(["promtool", "check", "rules", str(rules)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_figures_travel():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(FIGURES), type=Figures) == FIGURES
