"""`callboard ls`, `pull` and `rm`: the models on this machine — those of the hub's cache and the demo model's."""

import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

from protocol.endpoints import running_servers
from server.cli_cache import age, size
from server.models.cache import cache_root
from server.models.errors import ModelError
from server.models.resolve import check_folder, resolve_model


class LocalModel(NamedTuple):
    """A model on this machine. `problem` says why it can't be served, empty when it can."""

    name: str
    folder: Path
    nbytes: int
    used: float
    problem: str


def local_models() -> list[LocalModel]:
    """All models in the hub's cache and in ours, by name."""
    return sorted([*_hub_models(), *_own_models()])


def _hub_models() -> list[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    found = []
    for repo in cache.repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        folder = max(repo.revisions, key=lambda revision: revision.last_modified).snapshot_path
        problem = _problem(folder, repo.repo_id)
        found.append(LocalModel(repo.repo_id, folder, repo.size_on_disk, repo.last_accessed, problem))
    return found


def _own_models() -> list[LocalModel]:
    root = cache_root() / "models"
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.is_dir() and not folder.name.startswith("."):
            nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            used = folder.stat().st_atime
            found.append(LocalModel(folder.name, folder, nbytes, used, _problem(folder, folder.name)))
    return found


def _problem(folder: Path, name: str) -> str:
    try:
        check_folder(folder, name)
    except ModelError as error:
        return str(error)
    return ""


def ls() -> int:
    """List the models."""
    from rich.console import Console
    from rich.table import Table

    models = local_models()
    if not models:
        print("No model is here yet; `callboard pull MODEL` fetches one, and so does `callboard serve MODEL`.")
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("used", justify="right")
    table.add_column("")
    served = _served()
    for model in models:
        state = "is served" if str(model.folder) in served else "can't be served" if model.problem else ""
        table.add_row(model.name, size(model.nbytes), age(time.time() - model.used), state)
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def pull(model: str) -> int:
    """Fetch a model, with progress. 0 when it is complete, 1 with the cause otherwise."""
    try:
        folder = resolve_model(model)
    except ModelError as error:
        print(f"callboard: {error}", file=sys.stderr)
        return 1
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{model} is here: {size(nbytes)} in {folder}")
    return 0


def rm(model: str, *, yes: bool) -> int:
    """Remove a model. 1 when there is none of that name, or a server uses it."""
    found = next((one for one in local_models() if one.name == model), None)
    if found is None:
        print(f"callboard: no model {model!r} is here; `callboard ls` lists them", file=sys.stderr)
        return 1
    if str(found.folder) in _served():
        print(f"callboard: a running server uses {model}; stop it first", file=sys.stderr)
        return 1
    if not yes and input(f"Remove {model} ({size(found.nbytes)})? [y/N] ").strip().lower() not in ("y", "yes"):
        return 1
    if found.folder.parent == cache_root() / "models":
        shutil.rmtree(found.folder)
    else:
        from huggingface_hub import scan_cache_dir

        cache = scan_cache_dir()
        revisions = [
            revision.commit_hash
            for repo in cache.repos
            if repo.repo_id == model and repo.repo_type == "model"
            for revision in repo.revisions
        ]
        cache.delete_revisions(*revisions).execute()
    print(f"Removed {model}, {size(found.nbytes)}.")
    return 0


def _served() -> set[str]:
    """Folders of the models that running servers have in memory."""
    from actors.config import config_path, read_config

    found = set()
    for record in running_servers():
        run_dir = Path(record.run_dir)
        for folder in (run_dir, *(path.parent for path in run_dir.glob(f"m*/{config_path(run_dir).name}"))):
            try:
                found.add(read_config(folder).model_path)
            except (OSError, ValueError):
                continue
    return found
