"""Adapters in the engine: what mlx-lm computes, whatever else is in the batch, with few of them in memory."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.adapter_files import AdapterFiles, read_adapter
from actors.engine.adapters import Adapters
from actors.engine.lora import Lora, LoraLinear, select
from actors.engine.model import Model, ModelError, add_adapters, mx
from bench.made_adapters import write_adapters, write_mlx_adapter
from cache_store.store import PrefixStore
from protocol.errors import INTERNAL_ERROR, MODEL_NOT_FOUND
from protocol.ids import pack_ids
from protocol.messages import SamplingParams, Submit

NAMES = ["ada", "bob", "cleo", "dora"]
PROMPT = [5, 6, 7, 8, 9, 100]


def linears(model: Model) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the linear layers in the model's blocks."""
    shapes = {}
    for name, module in model._network.named_modules():
        if type(module).__name__ in ("Linear", "QuantizedLinear") and ".layers." in name:
            outputs, inputs = module.weight.shape
            shapes[name] = (inputs * 32 // module.bits if "scales" in module else inputs), outputs
    return shapes


def with_adapters(model: Model, folder: Path, names: Iterable[str] = NAMES, max_loras: int = 8) -> Model:
    folders = write_adapters(folder, linears(model), names)
    add_adapters(model, [read_adapter(name, path) for name, path in folders.items()], max_loras)
    return model


@pytest.fixture
def plain_model(kind_model) -> Callable[..., Model]:
    return lambda: kind_model("plain")


@pytest.fixture
def adapted(plain_model, tmp_path: Path) -> Model:
    return with_adapters(plain_model(), tmp_path)


class Alone:
    """A model as the plain run wants it, all of whose rows have one adapter."""

    def __init__(self, model: Model, adapter: str) -> None:
        self._model = model
        self._adapter = adapter
        self.vocab_size = model.vocab_size
        self.new_caches = model.new_caches

    def forward(self, ids: mx.array, caches: list[Any]) -> mx.array:
        assert self._model.adapters is not None
        self._model.adapters.begin([(-7, self._adapter)])
        try:
            return self._model.forward(ids, caches, [-7])
        finally:
            self._model.adapters.release([-7])


def quantized(model: Model) -> Model:
    import mlx.nn as nn

    nn.quantize(model._network, group_size=32, bits=4)
    return model


@pytest.mark.parametrize("kind", ["plain", "weights", "hybrid", "recurrent"])
def test_logits_are_those_of_mlx_lm(kind: str, kind_model, tmp_path: Path) -> None:
    from mlx_lm.tuner.utils import load_adapters

    def fresh() -> Model:
        mx.random.seed(0)  # some architectures begin with random vectors
        return quantized(kind_model("plain")) if kind == "weights" else kind_model(kind)

    model = with_adapters(fresh(), tmp_path)
    ids = mx.array([PROMPT])
    base = fresh().forward(ids, fresh().new_caches())
    assert model.adapters is not None
    model.adapters.begin(enumerate(NAMES))
    together = model.forward(mx.repeat(ids, 5, axis=0), model.new_caches(), [0, 1, -1, 2, 3])
    assert mx.array_equal(together[2:3], model.forward(mx.repeat(ids, 5, axis=0), model.new_caches())[2:3])
    for row, (rid, name) in zip((0, 1, 3, 4), enumerate(NAMES), strict=True):
        network = load_adapters(fresh()._network, str(tmp_path / name))
        network.eval()
        wanted = network(ids, cache=model.new_caches())
        size = float(mx.abs(wanted).max())
        assert float(mx.abs(wanted - base).max()) > 0.1 * size, "the adapter changes nothing"
        for found in (together[row : row + 1], model.forward(ids, model.new_caches(), [rid])):
            assert float(mx.abs(found - wanted).max()) < 1e-4 * size


def requests_of(make_request, count: int = 10, budget: int = 10) -> list[Submit]:
    """Rows without an adapter and with each, greedy and sampled, of several lengths."""
    return [
        make_request(
            rid,
            [3 + (7 * rid + i) % 500 for i in range((3, 40, 300)[rid % 3])],
            budget - rid % 3,
            temperature=[0.0, 0.9][rid % 2],
            adapter=["", *NAMES][rid % 5],
        )
        for rid in range(count)
    ]


def assert_same(model: Model, requests: Iterable[Submit], tokens: dict[int, list[int]], same_as_plain) -> None:
    requests = list(requests)
    for name in {each.adapter for each in requests}:
        mine = [each for each in requests if each.adapter == name]
        same_as_plain(Alone(model, name) if name else model, mine, tokens)


def test_rows_of_a_mixed_batch_get_what_each_gets_alone(
    adapted: Model, plain_model, make_request, start_run, same_as_plain
) -> None:
    requests = requests_of(make_request)
    together = start_run(adapted).all(requests)
    assert_same(adapted, requests, together, same_as_plain)
    bare = start_run(plain_model()).all([msgspec.structs.replace(each, adapter="") for each in requests])
    for each in requests:
        assert (together[each.rid] == bare[each.rid]) == (each.adapter == "")


def test_few_places_in_memory_are_enough_for_many_adapters(
    plain_model, tmp_path: Path, make_request, start_run, same_as_plain
) -> None:
    model = with_adapters(plain_model(), tmp_path, max_loras=1)
    assert model.adapters is not None
    assert model.adapters.resident == ["ada"]
    requests = requests_of(make_request)
    run = start_run(model)
    tokens = run.all(requests)
    assert_same(with_adapters(plain_model(), tmp_path), requests, tokens, same_as_plain)
    assert set(run.reasons.values()) == {"length"}


def test_an_adapter_in_use_stays_and_the_one_used_longest_ago_goes(
    plain_model, tmp_path: Path, make_request, start_run
) -> None:
    model = with_adapters(plain_model(), tmp_path, max_loras=2)
    adapters = model.adapters
    assert adapters is not None
    run = start_run(model)
    run.engine.submit(make_request(1, PROMPT, 200, adapter="ada"))
    for rid, name in ((2, "bob"), (3, "cleo")):  # ada was used before bob, but is in use still
        run.engine.submit(make_request(rid, PROMPT, 2, adapter=name))
        while rid not in run.reasons:
            run.turn()
    assert adapters.resident == ["ada", "cleo"]
    assert 1 not in run.reasons
    run.finish()
    run.all([make_request(4, PROMPT, 2, adapter="dora")])
    assert adapters.resident == ["dora", "cleo"]


def test_an_adapter_that_can_be_read_no_more_fails_its_rows_alone(
    plain_model, tmp_path: Path, make_request, start_run
) -> None:
    model = with_adapters(plain_model(), tmp_path, max_loras=1)
    (tmp_path / "bob" / "adapters.safetensors").unlink()
    run = start_run(model)
    run.all([make_request(1, PROMPT, 9, adapter="ada"), make_request(2, PROMPT, 9, adapter="bob", like=0)])
    assert run.reasons == {1: "length", 2: INTERNAL_ERROR}
    assert "bob" in run.errors[2]
    run.all([make_request(3, PROMPT, 9, adapter="cleo"), make_request(4, PROMPT, 9, adapter="eve")])
    assert run.reasons[3] == "length"
    assert run.reasons[4] == MODEL_NOT_FOUND


def test_a_row_that_leaves_while_its_adapter_is_read_holds_nobody_up(
    plain_model, tmp_path: Path, make_request, start_run
) -> None:
    model = with_adapters(plain_model(), tmp_path, max_loras=1)
    run = start_run(model)
    run.engine.submit(make_request(1, PROMPT, 9, adapter="bob"))
    run.turn()
    run.engine.abort([1])
    run.all([make_request(2, PROMPT, 9, adapter="cleo")])
    assert run.reasons == {2: "length"}


def test_prefixes_of_different_adapters_are_different(adapted: Model, make_request, start_run) -> None:
    ids = [3 + i % 500 for i in range(600)]
    names = ["", "ada", "bob"]
    cold = [start_run(adapted).all([make_request(0, ids, 6, adapter=name)])[0] for name in names]
    store: PrefixStore[Any] = PrefixStore(memory_bytes=64 << 20)
    run = start_run(adapted, store=store)
    for rid in range(6):
        run.all([make_request(rid, ids, 6, adapter=names[rid % 3])])
        assert run.tokens[rid] == cold[rid % 3]
    assert run.cached == {3: 512, 4: 512, 5: 512}
    assert sorted(entry.adapter for entry in store.entries()) == ["", "", "ada", "ada", "bob", "bob"]


def test_choices_grammarless_and_resumed_rows_keep_their_adapter(adapted: Model, make_request, start_run) -> None:
    sampled = {"temperature": 0.9, "seed": 3, "adapter": "bob", "params": SamplingParams(top_k=40)}
    whole = start_run(adapted).all([make_request(1, PROMPT, 12, choice=1, **sampled)])[1]
    both = start_run(adapted).all(
        [make_request(1, PROMPT, 12, **sampled), make_request(2, PROMPT, 12, choice=1, like=1, **sampled)]
    )
    assert both[2] == whole
    assert both[1] != whole
    resumed = make_request(3, [*PROMPT, *whole[:5]], 7, choice=1, **(sampled | {"prompt_tokens": len(PROMPT)}))
    assert start_run(adapted).all([resumed])[3] == whole[5:]
    assert resumed.ids == pack_ids([*PROMPT, *whole[:5]])


def test_without_a_row_that_has_one_the_graph_is_the_bare_models(adapted: Model, monkeypatch) -> None:
    assert adapted.adapters is not None
    adapted.adapters.begin([(1, "ada")])
    changes: list[Any] = []
    table = type(next(m for m in adapted._network.modules() if isinstance(m, LoraLinear))._table)
    change = table.change
    monkeypatch.setattr(table, "change", lambda *given: changes.append(given) or change(*given))
    adapted.forward(mx.array([PROMPT]), adapted.new_caches(), [2])
    assert changes == []
    adapted.forward(mx.array([PROMPT]), adapted.new_caches(), [1])
    assert len(changes) == len(linears_of_adapter(adapted))


def linears_of_adapter(model: Model) -> list[str]:
    return [name for name, module in model._network.named_modules() if isinstance(module, LoraLinear)]


@pytest.mark.parametrize(
    ("slots", "first", "last", "masked"),
    [([2, 2], 2, 3, False), ([2, -1], 2, 3, True), ([1, 3, -1], 1, 4, True)],
)
def test_a_selection_covers_the_slots_in_use(slots: list[int], first: int, last: int, masked: bool) -> None:
    found = select(slots)
    assert found is not None
    assert (found.first, found.last, found.mask is not None) == (first, last, masked)
    if found.mask is not None:
        own = [[slot == place for place in range(first, last)] for slot in slots]
        assert found.mask.reshape(len(slots), -1).tolist() == own
    assert select([-1, -1]) is None


def files_for(model: Model, folder: Path, shapes: dict[str, tuple[int, int]]) -> list[AdapterFiles]:
    return [read_adapter("x", write_mlx_adapter(folder, shapes))]


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"model.layers.9.self_attn.q_proj": (64, 64)}, "doesn't have"),
        ({"model.layers.0.self_attn.q_proj": (64, 32)}, "64 × 32, the model's 64 × 64"),
        ({"model.embed_tokens": (512, 64)}, "Embedding.*mlx_lm.fuse"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(plain_model, tmp_path: Path, shapes, said: str) -> None:
    model = plain_model()
    with pytest.raises(ModelError, match=said):
        add_adapters(model, files_for(model, tmp_path, shapes), 8)


def test_experts_are_refused(kind_model, tmp_path: Path) -> None:
    model = kind_model("hybrid")
    name = next(n for n, m in model._network.named_modules() if type(m).__name__ == "SwitchLinear")
    with pytest.raises(ModelError, match="SwitchLinear"):
        add_adapters(model, files_for(model, tmp_path, {name: (64, 32)}), 8)


def test_a_model_whose_rows_disturb_each_other_is_refused(plain_model, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("actors.engine.lora.select", lambda slots: None if slots[0] < 0 else select(slots[:1]))
    monkeypatch.setattr("actors.engine.adapters.select", lambda slots: select(slots[:1]) if slots else None)
    with pytest.raises(ModelError, match="doesn't get what it gets alone"):
        with_adapters(plain_model(), tmp_path)


def test_adapters_of_half_precision_are_kept_so(plain_model, tmp_path: Path) -> None:
    model = plain_model()
    folder = write_mlx_adapter(tmp_path, linears(model))
    path = str(folder / "adapters.safetensors")
    weights = {name: array.astype(mx.bfloat16) for name, array in mx.load(path).items()}
    mx.save_safetensors(path, weights, metadata={"format": "mlx"})
    files = read_adapter("x", folder)
    lora = Lora(model._network, [files], 1)
    Adapters(lora, [files]).preload()
    name, table = next(iter(lora._tables.items()))
    assert table.a.dtype == mx.bfloat16
    assert mx.array_equal(table.a, weights[f"{name}.lora_a"].T)
    assert mx.array_equal(table.b, weights[f"{name}.lora_b"] * 2)
