"""`Model`: the one module that wraps mlx-lm. Loads a model's weights, runs its forward pass, makes its caches.

Used by the engine process alone, on its one thread. The tokenizer is not loaded here.
"""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog
from mlx.utils import tree_flatten

from actors.adapter_files import AdapterFiles
from actors.engine.adapters import Adapters, mixes_rightly
from actors.engine.block_layout import BlockLayout, block_layout
from actors.engine.lora import Lora
from actors.engine.memory import available_for_weights
from actors.engine.row_memory import RowMemory, row_memory
from actors.engine.slots import SlotCache, slot_cache
from actors.model_files import ModelFiles, read_model_files


@contextmanager
def _file_limit_kept() -> Iterator[None]:
    # mlx_lm.utils sets the limit of open files to (2048, 4096) when it is imported. That can't be undone
    # afterwards: an ordinary user can't raise the hard limit again.
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original


with _file_limit_kept():
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
    from mlx_lm.utils import load_model

log = structlog.get_logger()

Cache = Any  # one of mlx-lm's cache classes; what the batch asks of them is listed in `_unbatchable`
_BATCH_INTERFACE = ("prepare", "finalize", "extend", "filter", "state")


class ModelError(Exception):
    """A model can't be served; the text is for the user."""


class Model:
    """A loaded model. `context` and `vocab_size` are in tokens."""

    def __init__(
        self,
        network: Any,
        files: ModelFiles,
        max_kv_size: int | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
    ) -> None:
        self.files = files
        self.context = files.context
        self.vocab_size = files.vocab_size
        self.eos_token_ids = frozenset(files.eos_token_ids)
        self._network = network
        self._max_kv_size = max_kv_size
        self._kv_bits = kv_bits
        self._kv_group_size = kv_group_size
        fresh = self.new_caches()
        self.plain_caches = all(type(cache) is KVCache for cache in fresh)
        self.cache_kinds = sorted({kind for cache in fresh for kind in kinds_of(cache)})
        self.batches_prefill = all(_merges(cache) for cache in fresh)
        self.batches_rows = all(slot_cache(cache) is not None for cache in fresh)
        self.step_bytes = _bytes_read(network)
        self.depth_cost = _depth_cost(network, sum(type(cache) in (KVCache, QuantizedKVCache) for cache in fresh))
        self.row_memory = RowMemory()
        self.block_layout: BlockLayout | None = None  # none until a first step, or for a kind that can't be cut
        self.adapters: Adapters | None = None
        self.splits_head = False  # whether `next_logits` works, known after a first step
        self.building = 0.0  # seconds that mlx-lm's own Python took to build graphs

    def hidden(self, ids: mx.array, caches: list[Cache] | None) -> mx.array:
        """Last hidden states (rows, tokens, width) of `ids` (rows, tokens)."""
        states: mx.array = self._network.model(ids, cache=caches)
        return states

    def head(self, states: mx.array) -> mx.array:
        """Logits of hidden states, by the output layer alone."""
        if "lm_head" in self._network:
            logits: mx.array = self._network.lm_head(states)
            return logits
        tied: mx.array = self._network.model.embed_tokens.as_linear(states)
        return tied

    def forward(self, ids: mx.array, caches: list[Cache], rids: Sequence[int] = ()) -> mx.array:
        """Logits (rows, tokens, vocabulary) of `ids` (rows, tokens); `caches` take up the new keys and values.

        `rids` names the rows, each of which gets its adapter; those of unknown ones get the bare model.
        """
        return self._built(lambda: self._network(ids, cache=caches), rids)

    def next_logits(self, ids: mx.array, caches: list[Cache], rids: Sequence[int] = ()) -> mx.array:
        """Logits (rows, vocabulary) behind the last of `ids` alone, else like `forward`. For models that `splits_head`
        tells of."""
        return self._built(lambda: self.head(self.hidden(ids, caches)[:, -1:])[:, -1], rids)

    def _built(self, build: Callable[[], mx.array], rids: Sequence[int]) -> mx.array:
        began = time.perf_counter()
        if self.adapters is None:
            logits = build()
        else:
            with self.adapters.chosen(rids):
                logits = build()
        self.building += time.perf_counter() - began
        return logits

    def new_caches(self) -> list[Cache]:
        """Empty caches for one row, one per layer that has one.

        With `max_kv_size` plain caches become windows of that size. They keep no first tokens: mlx-lm loses
        kept ones silently as soon as rows are batched. With `kv_bits` they become quantized ones.
        """
        caches: list[Cache] = make_prompt_cache(self._network)
        return [self._instead_of(cache) for cache in caches]

    def _instead_of(self, cache: Cache) -> Cache:
        if parts := getattr(cache, "caches", None):
            cache.caches = type(parts)(self._instead_of(part) for part in parts)
            return cache
        if type(cache) is not KVCache:
            return cache
        if self._max_kv_size is not None:
            return RotatingKVCache(max_size=self._max_kv_size, keep=0)  # type: ignore[no-untyped-call]  # mlx-lm's
        if self._kv_bits is not None:
            return QuantizedKVCache(group_size=self._kv_group_size, bits=self._kv_bits)
        return cache

    def new_slots(self) -> list[SlotCache]:
        """Empty batched caches, one per layer that has one.

        Raises ModelError for a kind of cache that we can't batch.
        """
        slots = []
        for cache in self.new_caches():
            slot = slot_cache(cache)
            if slot is None:
                kinds = ", ".join(kinds_of(cache))
                raise ModelError(f"{self.files.model_type} uses a cache that can't be batched: {kinds}")
            slots.append(slot)
        return slots


def plain_cache(keys: mx.array | None = None, values: mx.array | None = None) -> Cache:
    """A plain cache of one row that holds these, (1, heads, tokens, width)."""
    cache: Cache = KVCache()  # type: ignore[no-untyped-call]  # mlx-lm's
    if keys is not None:
        cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]
    return cache


def load(
    path: str | Path,
    max_kv_size: int | None = None,
    trust_remote_code: bool = False,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    adapters: Sequence[AdapterFiles] = (),
    max_loras: int = 8,
) -> Model:
    """Load the model in folder `path` and try it. `max_loras` of the `adapters` are in memory at once.

    Raises ModelError, with a text for the user, when files are missing or damaged, the architecture or a kind
    of cache isn't supported, an adapter doesn't fit, or memory is too small.
    """
    path = Path(path)
    try:
        files = read_model_files(path)
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from error
    _check_memory(path)
    network = _load_network(path, files, trust_remote_code)
    model = Model(network, files, max_kv_size, kv_bits, kv_group_size)
    _check_options(model, max_kv_size, kv_bits)
    width = try_out(model)
    if not model.vocab_size:
        model.vocab_size = width
    if adapters:
        add_adapters(model, adapters, max_loras)
    return model


def add_adapters(model: Model, adapters: Sequence[AdapterFiles], max_loras: int) -> None:
    """Let rows use these adapters, and try the first one. Raises ModelError."""
    try:
        lora = Lora(model._network, adapters, min(max_loras, len(adapters)))
        model.adapters = Adapters(lora, adapters)
        model.adapters.preload()
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from error
    try:
        right = mixes_rightly(model.adapters, lambda ids, rids: model.forward(ids, model.new_caches(), rids))
    except Exception as error:
        raise ModelError(f"{model.files.path} loads, but a step with an adapter fails: {error}") from error
    if not right:
        raise ModelError(
            f"adapters can't be served with {model.files.model_type}: in one batch with others, a row doesn't get what "
            "it gets alone; make one model of an adapter and its base with `mlx_lm.fuse`, and serve that"
        )


def _check_memory(path: Path) -> None:
    weights = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
    available = available_for_weights()
    if weights > available:
        raise ModelError(
            f"not enough memory for {path}: its weights take {_size(weights)}, "
            f"{_size(available)} are free; take a smaller or a quantized model"
        )


def _load_network(path: Path, files: ModelFiles, trust_remote_code: bool) -> Any:
    architecture = f"{files.model_type} (mlx-lm {version('mlx-lm')})"
    try:
        network, _ = load_model(path, trust_remote_code=trust_remote_code)
    except FileNotFoundError as error:
        raise ModelError(f"{path} holds no weights (model*.safetensors)") from error
    except MemoryError as error:
        raise ModelError(f"not enough memory to load {path}") from error
    except ValueError as error:
        if "not supported" in str(error):
            raise ModelError(f"the architecture {architecture} is not supported: {error}") from error
        raise ModelError(f"{path} can't be loaded as {architecture}: {error}") from error
    except Exception as error:
        # Whatever a config with unexpected values or a damaged weight file leads to inside mlx-lm.
        raise ModelError(f"{path} can't be loaded as {architecture}: {type(error).__name__}: {error}") from error
    return network


def _check_options(model: Model, max_kv_size: int | None, kv_bits: int | None) -> None:
    kinds = {kind for cache in model.new_caches() for kind in kinds_of(cache)}
    model_type = model.files.model_type
    if max_kv_size is not None and "RotatingKVCache" not in kinds:
        raise ModelError(f"max_kv_size doesn't apply to the caches of {model_type}: {', '.join(sorted(kinds))}")
    if kv_bits is not None and "QuantizedKVCache" not in kinds:
        raise ModelError(f"kv_bits doesn't apply to the caches of {model_type}: {', '.join(sorted(kinds))}")


def kinds_of(cache: Cache) -> list[str]:
    """Names of mlx-lm's classes in `cache`."""
    if (parts := getattr(cache, "caches", None)) is not None:
        return [kind for part in parts for kind in kinds_of(part)]
    return [type(cache).__name__]


def _merges(cache: Cache) -> bool:
    """Whether rows with such caches can be prefilled together by mlx-lm's own batched caches."""
    if (parts := getattr(cache, "caches", None)) is not None:
        return all(_merges(part) for part in parts)
    if getattr(cache, "keep", 0):
        return False  # mlx-lm's batches lose the kept tokens
    if not hasattr(cache, "merge"):
        return False
    merged = type(cache).merge([cache])
    return all(hasattr(merged, needed) for needed in _BATCH_INTERFACE)


def _bytes_read(network: Any) -> int:
    """Bytes of weights that a decode step reads: all but an embedding table that isn't the head, too."""
    weights = dict(tree_flatten(network.parameters()))
    total = sum(array.nbytes for array in weights.values())
    if any("lm_head" in name for name in weights):
        total -= sum(array.nbytes for name, array in weights.items() if "embed_tokens" in name)
    return int(total)


def _depth_cost(network: Any, layers: int) -> float:
    """What attention to one more token adds to the work for a token, as a part of that of all weights; 0 where the
    model doesn't tell. `layers` are those that attend to all tokens.

    Counted in multiplications. A mixture of experts is taken to use all of them, so attention there costs more than is
    said here; so it does on a CPU (measured with llamas of 0.1 and 135 million weights: as much, and four times so).
    """
    args = getattr(network, "args", None)
    heads, width, states = (getattr(args, name, None) for name in ("num_attention_heads", "head_dim", "hidden_size"))
    if not isinstance(heads, int) or not heads:
        return 0.0
    if not isinstance(width, int):
        width = states // heads if isinstance(states, int) else 0
    weights = 0
    for name, module in network.named_modules():
        if "weight" not in module or "embed" in name or name.endswith("lm_head") or module["weight"].ndim < 2:
            continue
        packed = 32 // module.bits if module["weight"].dtype == mx.uint32 and hasattr(module, "bits") else 1
        weights += module["weight"].size * packed
    return 2 * layers * heads * width / weights if weights else 0.0


def try_out(model: Model) -> int:
    """One small prefill and a decode step, so that what can't work on this device fails at start.

    Returns the width of the logits.
    """
    try:
        caches = model.new_caches()
        logits = model.forward(mx.zeros((1, 2), mx.uint32), caches)
        logits = model.forward(mx.argmax(logits[:, -1:], axis=-1), caches)
        mx.eval(logits)
        model.row_memory = row_memory(caches)
        model.block_layout = block_layout(caches)
        model.splits_head = _splits_head(model, logits.shape[-1])
    except Exception as error:
        raise ModelError(f"{model.files.path} loads, but a first step fails: {error}") from error
    return int(logits.shape[-1])


def _splits_head(model: Model, width: int) -> bool:
    """Whether the output layer that `Model.head` finds is all that turns hidden states into logits, to the bit."""
    ids = mx.array([[0, 1, width // 3, width // 2, width - 1]], mx.uint32)
    wanted = model.forward(ids, model.new_caches())
    try:
        found = model.head(model.hidden(ids, model.new_caches()))
        same = found.dtype == wanted.dtype and bool(mx.array_equal(found, wanted))
    except Exception:  # built otherwise
        return False
    return same and bool(mx.any(wanted != 0))  # of nothing but zeros anything is the same


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
