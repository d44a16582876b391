"""Servers that embed and rank, on the tiny random model, held to a direct forward in a process of its own."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ollama
import openai
import pytest

from bench.ask import post
from bench.checks import fuzz
from bench.checks.report import Report
from bench.curl_lines import curl_lines, run_curl
from bench.harness import RunningServer
from protocol import AsyncClient, Client
from protocol.errors import RequestRejected

TEXTS = ["Hello", "A longer text, of more than a few tokens.", "x " * 700, "Hello"]
DIRECT = """
import json, sys
import mlx.core as mx
from actors.engine.model import load
from actors.tokenizer.text_tokenizer import load_tokenizer
folder, *texts = json.loads(sys.stdin.read())
model, tokenizer = load(folder), load_tokenizer(folder)
vectors = []
for text in texts:
    hidden = model._network.model(mx.array([tokenizer.encode(text)]))[0, -1]
    vectors.append((hidden / mx.linalg.norm(hidden)).tolist())
print(json.dumps(vectors))
"""
DIRECT_RANK = """
import json, sys
import mlx.core as mx
from actors.engine.model import load
from actors.streamer.pool_calls import prompts
from actors.tokenizer.text_tokenizer import load_tokenizer
from protocol.messages import Rank
folder, query, *documents = json.loads(sys.stdin.read())
model, tokenizer = load(folder), load_tokenizer(folder)
yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
scores = []
for text in prompts(Rank(1, query, documents)):
    logits = model._network(mx.array([tokenizer.encode(text, add_special_tokens=False)]))[0, -1]
    scores.append(float(mx.softmax(logits[mx.array([yes, no])])[0]))
print(json.dumps(scores))
"""


def direct(script: str, *given: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(given), capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout.splitlines()[-1])


def while_the_engine_dies(server: RunningServer, path: str, body: dict) -> dict:
    """The answer to a request during which the engine is killed."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server.url + path, body, timeout=60)
        server.kill("engine")
        assert answer.result().status == 200
    return answer.result().body


@pytest.fixture(scope="module")
def embedder(tiny_model: Path) -> Iterator[RunningServer]:
    with RunningServer(tiny_model, "--served-model-name", "tiny", "--task", "embed") as running:
        yield running


def test_vectors_are_those_of_a_direct_forward(embedder: RunningServer, tiny_model: Path):
    wanted = direct(DIRECT, str(tiny_model), *TEXTS)
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", http_client=http, max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS)  # in base64, as the package asks for by itself
        plain = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float", dimensions=8)
    for mine, theirs in zip([one.embedding for one in answer.data], wanted, strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5)
    short = plain.data[0].embedding
    assert len(short) == 8
    assert math.hypot(*short) == pytest.approx(1)
    with Client(endpoint=embedder.endpoint) as client:
        ids = [client.tokenize(text) for text in TEXTS]
        vectors = client.embed(ids=ids)
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert vectors[1][0] == pytest.approx(wanted[1], abs=2e-5)


def test_ollamas_package_gets_the_same_vectors(embedder: RunningServer):
    wanted = post(f"{embedder.url}/v1/embeddings", {"input": TEXTS[:2], "dimensions": 8}).body["data"]
    with ollama.Client(embedder.url, trust_env=False) as client:
        answer = client.embed("tiny", TEXTS[:2], dimensions=8, truncate=False)
        assert [*answer.embeddings] == [pytest.approx(one["embedding"], abs=2e-5) for one in wanted]
        assert len(client.embeddings("tiny", TEXTS[0]).embedding) > 8
        with pytest.raises(ollama.ResponseError, match=r"options\.num_ctx"):
            client.embed("tiny", "x", options={"num_ctx": 8})


def test_vectors_survive_the_death_of_the_engine(embedder: RunningServer):
    texts = [f"{number} " * (1 + 40 * (number % 20)) for number in range(30)]
    wanted = post(f"{embedder.url}/v1/embeddings", {"input": texts}, timeout=60).body["data"]
    got = while_the_engine_dies(embedder, "/v1/embeddings", {"input": texts})["data"]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["index"] == theirs["index"]
        assert mine["embedding"] == pytest.approx(theirs["embedding"], abs=2e-5)
    embedder.wait_idle()


def test_the_curl_line_of_the_docs_works(embedder: RunningServer):
    assert [run_curl(line, embedder.url)[0] for line in curl_lines() if "/v1/embeddings" in line] == [200]


def test_what_a_server_was_not_started_for_is_400(embedder: RunningServer, server: RunningServer):
    for url, path, body in (
        (embedder.url, "/v1/completions", {"prompt": "x"}),
        (embedder.url, "/v1/rerank", {"query": "x", "documents": ["y"]}),
        (server.url, "/v1/embeddings", {"input": "x"}),
        (embedder.url, "/v1/embeddings", {"input": []}),
        (embedder.url, "/v1/embeddings", {"input": [""]}),
        (embedder.url, "/v1/embeddings", {"input": "x", "dimensions": 100_000}),
    ):
        answer = post(url + path, body)
        assert answer.status == 400, (path, answer.body)


@pytest.mark.filterwarnings("ignore")
def test_no_request_breaks_a_server_that_embeds(embedder: RunningServer, report: Report):
    fuzz.schemathesis_finds_nothing(report, embedder, 1)
    assert report.failures == []


def test_documents_are_ranked_as_by_a_direct_forward(tiny_model: Path):
    documents = ["Paris is a city.", "x " * 600, "Paris is a city."]
    wanted = direct(DIRECT_RANK, str(tiny_model), "Where is Paris?", *documents)
    with RunningServer(tiny_model, "--task", "rerank") as ranker:

        async def ranked() -> list[tuple[float, int]]:
            async with AsyncClient(endpoint=ranker.endpoint) as client:
                return await client.rank("Where is Paris?", documents)

        with Client(endpoint=ranker.endpoint) as client:
            by_client = client.rank("Where is Paris?", iter(documents))
            told = client.rank("Where is Paris?", documents, "Say something else.")
            with pytest.raises(RequestRejected):
                client.embed(["Paris"])
        assert asyncio.run(ranked()) == by_client
        body = {"query": "Where is Paris?", "documents": [documents[0], {"text": documents[1]}, documents[2]]}
        answer = post(f"{ranker.url}/v1/rerank", body).body
        results = answer["results"]
        first = post(f"{ranker.url}/v1/rerank", {**body, "top_n": 1, "return_documents": True}).body["results"]
        again = while_the_engine_dies(ranker, "/v1/rerank", {**body, "documents": body["documents"] * 8})["results"]
        assert [run_curl(line, ranker.url)[0] for line in curl_lines() if "/v1/rerank" in line] == [200]
    by_index = {result["index"]: result["relevance_score"] for result in results}
    assert [by_index[i] for i in range(3)] == pytest.approx(wanted, abs=1e-4)
    assert [score for score, _ in by_client] == pytest.approx(wanted, abs=1e-4)
    assert [score for score, _ in told] != pytest.approx(wanted, abs=1e-4)
    assert sum(count for _, count in by_client) == answer["usage"]["prompt_tokens"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(result["relevance_score"] for result in again) == pytest.approx(sorted(wanted * 8), abs=1e-4)
    assert len(first) == 1
    assert first[0]["document"]["text"] == documents[first[0]["index"]]
