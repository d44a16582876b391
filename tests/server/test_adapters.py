"""Adapters as the CLI reads them, and as HTTP clients see them."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from fake_supervisor import CARD, system_state
from http_worker import HttpWorker, chat

from bench.made_adapters import write_mlx_adapter
from server.cli_serve import CannotServe, find_adapters
from server.settings import resolve_settings

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}


def adapters_of(*paths: str, **more: str) -> dict[str, str]:
    return find_adapters(resolve_settings(Namespace(config=None, adapter_path=",".join(paths), **more), {}))


def test_adapters_are_found_by_name(tmp_path: Path) -> None:
    one, two = (write_mlx_adapter(tmp_path / name, SHAPES) for name in ("one", "two"))
    assert adapters_of(f"{one}", f"fr={two}") == {"one": str(one), "fr": str(two)}


def test_what_can_not_be_served_is_said_before_anything_starts(tmp_path: Path) -> None:
    one = write_mlx_adapter(tmp_path / "one", SHAPES)
    full = write_mlx_adapter(tmp_path / "full", SHAPES, fine_tune_type="full")
    for paths, said in (
        ((f"{tmp_path}/none",), "there is no folder"),
        ((f"{full}",), r"full fine-tune.*mlx_lm\.fuse"),
        ((f"{one}", f"one={full}"), "full fine-tune"),
        ((f"{one}", f"one={one}"), "two adapters are called 'one'"),
    ):
        with pytest.raises(CannotServe, match=said):
            adapters_of(*paths)
    with pytest.raises(CannotServe, match="--task"):
        adapters_of(f"{one}", task="embed")


def test_an_adapter_is_a_model_to_http_clients(start_worker: Callable[..., HttpWorker]) -> None:
    worker = start_worker()
    card = msgspec.structs.replace(CARD, adapters={"fr": "adapters/fr"})
    worker.tell(msgspec.structs.replace(system_state("ok", worker.streamer.endpoint, 3), card=card))
    models = worker.client.get("/v1/models").json()["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in models] == [
        ("tiny", "tiny", None),
        ("fr", "adapters/fr", "tiny"),
    ]
    assert worker.client.get("/v1/models/fr").json() == models[1]
    answer = worker.client.post("/v1/chat/completions", json=chat() | {"model": "fr"})
    assert answer.json()["model"] == "fr"
    assert worker.streamer.stream().request.model == "fr"
    bodies = {
        "/v1/responses": {"input": "x", "store": False},
        "/v1/messages": {"max_tokens": 9, "messages": chat()["messages"]},
    }
    for path, body in bodies.items():
        assert worker.client.post(path, json=body | {"model": "fr"}).json()["model"] == "fr"
        assert worker.client.post(path, json=body).json()["model"] == "tiny"
        missing = worker.client.post(path, json=body | {"model": "de"})
        assert missing.status_code == 404
        assert "'fr'" in missing.json()["error"]["message"]
