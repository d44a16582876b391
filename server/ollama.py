"""Ollama's API, so that tools that only know Ollama work: `/api/chat`, `generate`, `tags`, `show`, `ps`, `embed`.

Used by the app, on the event loop. A request without a prompt has its model loaded, one with `keep_alive` 0 unloaded,
where there are several. What would change which models there are is answered with the command to use.
"""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from protocol import AsyncClient
from protocol.errors import LOADING, PROMPT_TOO_LONG, RequestRejected
from protocol.messages import Grammar, ModelCard, SamplingParams, ToolChoice
from server.backend import Backend
from server.backends import Backends
from server.chat import template_kwargs
from server.choosing import Chooser
from server.endpoints import Plain
from server.errors import UNSUPPORTED, ApiError, invalid
from server.generation import Generation, sampling_params
from server.ollama_answers import OllamaAnswer, now
from server.pooled import shortened
from server.request_body import check_depth, decode_request
from server.schemas import FunctionSpec, SamplingFields, ToolSpec
from server.schemas_ollama import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
    OllamaShowRequest,
)
from server.structured import json_schema
from server.tools import Tools, check_count, tool_of
from server.unsupported import OLLAMA_UNSUPPORTED

VERSION = "0.12.0"  # of Ollama's API that this follows
LINES = "application/x-ndjson"
MOST_KEPT = 1e9  # seconds: what is beyond any date
_NEVER = "2318-01-01T00:00:00Z"  # what Ollama writes for models that stay
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
_INSTEAD = {
    "pull": "callboard pull MODEL",
    "delete": "callboard rm MODEL",
    "create": "callboard serve FOLDER --served-model-name NAME",
    "copy": "callboard serve MODEL --served-model-name NAME",
    "push": "the hub's own tools",
}


class OllamaApi:
    """All endpoints but those of the frame (`GenerateEndpoint`, `JsonCall`), which call its parts."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    # Generating.

    def parse_chat(self, body: bytes, model: str, _request_id: str) -> tuple[str | None, Generation | Plain]:
        """`POST /api/chat`. Raises ApiError naming the field that is wrong."""
        request = decode_request(body, OllamaChatRequest, OLLAMA_UNSUPPORTED)
        if not request.messages:
            return self._plain(request.model), self._nothing(request, {"message": {"role": "assistant", "content": ""}})
        messages = [_message(message, i) for i, message in enumerate(request.messages)]
        check_depth(messages, "messages")
        check_count(request.tools)
        tools: Tools = []
        for tool in request.tools or ():
            asked = tool.function
            tools.append(tool_of(ToolSpec("function", FunctionSpec(asked.name, asked.description, asked.parameters))))
        check_depth(tools, "tools")
        made = self._generation(request, {"messages": messages}, chat=True, tools=tools)
        last = messages[-1]
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
            made.template_kwargs["continue_final_message"] = True
        return self._plain(request.model), made

    def parse_generate(self, body: bytes, model: str, _request_id: str) -> tuple[str | None, Generation | Plain]:
        """`POST /api/generate`. Raises ApiError naming the field that is wrong."""
        request = decode_request(body, OllamaGenerateRequest, OLLAMA_UNSUPPORTED)
        for name in ("suffix", "template", "images"):
            if getattr(request, name):
                raise ApiError(UNSUPPORTED, f"{name} is not supported", param=name)
        if not request.prompt:
            return self._plain(request.model), self._nothing(request, {"response": ""})
        plain: dict[str, Any] = {"prompt": request.prompt}
        if request.raw:
            return self._plain(request.model), self._generation(request, plain, chat=False, tools=[])
        system = [{"role": "system", "content": request.system}] if request.system else []
        prompt = {"messages": [*system, {"role": "user", "content": request.prompt}]}
        made = self._generation(request, prompt, chat=False, tools=[])
        backend = self._find(request.model)

        async def without_template(generation: Generation, _clients: Sequence[AsyncClient]) -> None:
            if backend.card is not None and not backend.card.has_chat_template:
                generation.prompts, generation.template_kwargs, generation.split_reply = [plain], {}, False

        made.prepare = without_template
        return self._plain(request.model), made

    def _generation(self, request: OllamaRequest, prompt: dict[str, Any], *, chat: bool, tools: Tools) -> Generation:
        thinks = request.think not in (None, False)
        kwargs: dict[str, Any] = {} if request.think is None else {"enable_thinking": thinks}
        effort = request.think if isinstance(request.think, str) else None
        return Generation(
            prompts=[prompt],
            params=_params(request),
            answer=OllamaAnswer(_shown(self._find(request.model)), chat=chat, thinks=request.think is not False),
            stream=request.stream is not False,
            template_kwargs=(template_kwargs(None, effort) | kwargs) if "messages" in prompt else {},
            tools=tools,
            tool_choice=ToolChoice(),
            split_reply="messages" in prompt,
            media_type=LINES,
            keep_alive=seconds_of(request.keep_alive),
        )

    def _nothing(self, request: OllamaRequest, said: dict[str, Any]) -> Plain:
        """What answers a request that only loads or unloads. A model that is alone stays."""
        keep_alive = seconds_of(request.keep_alive)

        async def answer(choose: Chooser) -> Response:
            backend = self._find(request.model)
            if keep_alive == 0:
                choose.unload(backend.model)
            else:
                await choose(self._plain(request.model), keep_alive)
            done = "unload" if keep_alive == 0 else "load"
            return _json({"model": _shown(backend), "created_at": now(), **said, "done": True, "done_reason": done})

        return answer

    # What there is.

    def _plain(self, name: str) -> str:
        """Our name for what a client calls a model: it may have a tag of Ollama's."""
        known = any(backend.is_called(name) for backend in self._backends.all())
        return name if known else name.removesuffix(":latest")

    def _find(self, name: str) -> Backend:
        return self._backends.find(self._plain(name))

    def _card(self, backend: Backend) -> ModelCard:
        """What is known of a model. Raises ApiError while the only one is loading."""
        if backend.card is None and self._backends.house is None:
            raise ApiError(LOADING, "the model is still loading")
        return backend.card or ModelCard(backend.model, task=backend.held.task)

    def _entry(self, backend: Backend) -> dict[str, Any]:
        card = self._card(backend)
        digest = hashlib.sha256(card.name.encode()).hexdigest()
        modified = datetime.fromtimestamp(card.created or self._backends.system.started or time.time(), UTC)
        return {
            "name": _shown(backend),
            "model": _shown(backend),
            "modified_at": _written(modified),
            "size": backend.held.memory or backend.state.engine.memory or backend.held.size,
            "digest": digest,
            "details": _details(),
        }

    async def root(self, request: Request) -> Response:
        """`GET /`: the dashboard for browsers; the words that Ollama's tools look for."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/admin")
        return PlainTextResponse("Ollama is running")

    async def version(self, _request: Request) -> Response:
        """`GET /api/version`."""
        return _json({"version": VERSION})

    async def tags(self, _request: Request) -> Response:
        """`GET /api/tags`."""
        return _json({"models": [self._entry(backend) for backend in self._backends.all()]})

    async def ps(self, _request: Request) -> Response:
        """`GET /api/ps`."""
        models = []
        for backend in self._backends.all():
            there = backend.card is not None if self._backends.house is None else backend.held.state == "ready"
            if not there:
                continue
            entry = self._entry(backend)
            entry.pop("modified_at")
            until = datetime.now(UTC) + timedelta(seconds=backend.held.expires)
            entry["expires_at"] = _written(until) if backend.held.expires else _NEVER
            entry["size_vram"] = entry["size"]
            entry["context_length"] = self._card(backend).context
            models.append(entry)
        return _json({"models": models})

    async def show(self, body: bytes, _choose: Chooser) -> object:
        """`POST /api/show`. Raises ApiError when there is no such model."""
        asked = decode_request(body, OllamaShowRequest, {})
        name = asked.model or asked.name
        if not name:
            raise invalid("model is required", "model")
        backend = self._find(name)
        card = self._card(backend)
        kind = "completion" if card.task == "generate" else "embedding"
        capabilities = [kind, *(["tools"] if card.has_chat_template and card.task == "generate" else [])]
        info = {"general.architecture": "mlx", "mlx.context_length": card.context, "mlx.vocab_size": card.vocab_size}
        entry = self._entry(backend)
        fields = {
            "modelfile": f"FROM {card.name}",
            "parameters": "",
            "template": "{{ .Prompt }}",
            "details": entry["details"],
            "model_info": info,
            "capabilities": capabilities,
            "modified_at": entry["modified_at"],
        }
        return fields

    async def embed(self, body: bytes, choose: Chooser) -> object:
        """`POST /api/embed`, and `/api/embeddings`. Raises ApiError, and what the client raises."""
        asked = decode_request(body, OllamaEmbedRequest, {})
        given = asked.prompt if asked.input is None else asked.input
        if given is None:
            raise invalid("input is required", "input")
        for name, value in (asked.options or {}).items():
            if value is not None:
                raise ApiError(UNSUPPORTED, f"options.{name} is not supported here", param=f"options.{name}")
        backend = await choose(self._plain(asked.model), seconds_of(asked.keep_alive))
        began = time.monotonic()
        texts = [given] if isinstance(given, str) else given
        client = backend.client()
        try:
            found = await client.embed(texts)
        except RequestRejected as error:
            if error.code != PROMPT_TOO_LONG or asked.truncate is False or backend.card is None:
                raise
            found = await client.embed(ids=[await _cut(client, text, backend.card.context) for text in texts])
        count = sum(count for _, count in found)
        choose.used(count)
        vectors = shortened([vector for vector, _ in found], asked.dimensions)
        if asked.input is None:
            return {"embedding": vectors[0]}
        fields = {
            "model": _shown(backend),
            "embeddings": vectors,
            "total_duration": int((time.monotonic() - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": count,
        }
        return fields

    async def instead(self, request: Request) -> Response:
        """What Ollama does and this server leaves to its command line. Raises ApiError saying which command."""
        name = request.path_params["name"]
        raise ApiError(UNSUPPORTED, f"{name} is not done over HTTP here; use: {_INSTEAD.get(name, 'callboard --help')}")


def seconds_of(keep_alive: float | str | None) -> float | None:
    """How long a model is to be kept, in seconds: a number of them, or a text such as `5m` or `1h30m`.

    Below 0 means for ever. Raises ApiError when it is neither.
    """
    if keep_alive is None:
        return None
    return min(_seconds_in(keep_alive), MOST_KEPT)


def _seconds_in(keep_alive: float | str) -> float:
    if not isinstance(keep_alive, str):
        return keep_alive
    sign, text = (-1, keep_alive[1:]) if keep_alive.startswith("-") else (1, keep_alive)
    if _NUMBER.fullmatch(text):
        return sign * float(text)
    if not _DURATION.fullmatch(text):
        raise invalid("keep_alive must be seconds, or a text such as 5m", "keep_alive")
    return sign * sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


async def _cut(client: AsyncClient, text: str, most: int) -> list[int]:
    """The first `most` ids of a text, with what the tokenizer sets after every text: its state may be the vector."""
    ids, bare = await client.tokenize(text), await client.tokenize(text, add_special_tokens=False)
    if len(ids) <= most:
        return ids
    places = range(len(ids) - len(bare) + 1)
    after = next((ids[at + len(bare) :] for at in places if ids[at : at + len(bare)] == bare), [])
    return ids[: most - len(after)] + after


def _shown(backend: Backend) -> str:
    """The model's name with a tag, as Ollama's always have one."""
    return backend.model if ":" in backend.model else f"{backend.model}:latest"


def _written(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "mlx",
        "families": ["mlx"],
        "parameter_size": "",
        "quantization_level": "",
    }


def _params(request: OllamaRequest) -> SamplingParams:
    options = request.options or OllamaOptions()
    greedy = options.top_p == 0  # of the most probable tokens only the first
    fields = SamplingFields(
        temperature=options.temperature,
        top_p=None if greedy else options.top_p,
        top_k=1 if greedy else _whole(options.top_k, "top_k"),
        min_p=options.min_p,
        seed=_whole(options.seed, "seed"),
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )
    most = _whole(options.num_predict, "num_predict")
    stops = [options.stop] if isinstance(options.stop, str) else options.stop or []
    return sampling_params(
        fields,
        max_tokens=most if most is not None and most > 0 else None,  # else as many as there is room for
        stop=[stop for stop in stops if stop],
        grammar=_grammar(request),
        names=_NAMES,
    )


def _whole(value: float | None, name: str) -> int | None:
    if value is not None and not -(2.0**63) <= value < 2.0**63:
        raise invalid(f"options.{name} is no number that can be used", f"options.{name}")
    return None if value is None else int(value)


def _grammar(request: OllamaRequest) -> Grammar | None:
    if not request.format:
        return None
    if request.format == "json":
        return Grammar("json_object", "", "format")
    if isinstance(request.format, str):
        raise invalid("format must be json or a JSON schema", "format")
    return json_schema(request.format, "format")


def _message(message: OllamaMessage, index: int) -> dict[str, Any]:
    if message.images:
        raise ApiError(UNSUPPORTED, "images are not supported", param=f"messages[{index}].images")
    made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id or message.tool_name or "call"
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id or f"call_{number}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _text_of(call.function.arguments)},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return made


def _text_of(arguments: dict[str, Any] | str | None) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
