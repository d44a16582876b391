"""`--warm-prompts FILE`: prompts that are computed at start and whose blocks stay in the engine's memory.

Read by `actors.streamer.actor` on its one thread. One prompt per line, as JSON: `{"prompt": "…"}` or
`{"messages": [{"role": "system", "content": "…"}]}`, the latter with `"template_kwargs"` if wanted.
"""

from pathlib import Path
from typing import Any

import msgspec


class WarmPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line. Exactly one of `prompt` and `messages` is given; requests with the same `cache_salt` hit it."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    cache_salt: str = ""


def read_warm_prompts(path: Path) -> list[WarmPrompt]:
    """The prompts of a file. Raises ValueError with a text for the user."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--warm-prompts: {path} can't be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = msgspec.json.decode(line, type=WarmPrompt)
        except msgspec.MsgspecError as error:
            raise ValueError(f"--warm-prompts: line {number} of {path}: {error}") from None
        if (prompt.prompt is None) == (prompt.messages is None):
            raise ValueError(f"--warm-prompts: line {number} of {path}: give either prompt or messages")
        prompts.append(prompt)
    return prompts
