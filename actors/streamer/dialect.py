"""`Dialect`: how a model marks its reasoning and its tool calls, in text and in token ids.

Made once by the streamer from the model's files; used on its one thread.
"""

import structlog

from actors.model_files import ModelFiles, read_json
from actors.streamer.tool_format import JSON_TOOLS, ToolFormat, infer_format
from actors.tokenizer.text_tokenizer import TextTokenizer
from protocol.ids import pack_ids
from protocol.messages import Thinking

log = structlog.get_logger()

# As mlx_lm.tokenizer_utils._infer_thinking: the marks, and the tokens that show that a model has them.
_THINKING = (
    (("<think>", "</think>"), ("<think>", "</think>")),
    (("<longcat_think>", "</longcat_think>"), ("<longcat_think>", "</longcat_think>")),
    (("<|think:start|>", "<|think:end|>"), ("<|think:start|>", "<|think:end|>")),
    (("<|channel>thought", "<channel|>"), ("<|channel>", "<channel|>")),
    (("<|open|>think<|sep|>", "<|close|>think<|sep|>"), ("<|open|>", "<|close|>", "<|sep|>")),
)


class Dialect:
    """`think` holds the marks of reasoning, None for a model that has none. `specials` are the special tokens of the
    tokenizer, which texts leave out and marks may consist of."""

    def __init__(self, files: ModelFiles, tokenizer: TextTokenizer) -> None:
        backend = tokenizer.backend
        added = {} if backend is None else backend.get_added_tokens_decoder()
        names = {token.content for token in added.values()}
        self.specials = {number: token.content for number, token in added.items() if token.special}
        self.think = next((marks for marks, needed in _THINKING if names.issuperset(needed)), None)
        self._begin: list[int] = []
        self._end: list[int] = []
        if self.think is not None:
            begin, end = self.think
            self._begin = tokenizer.encode(begin, add_special_tokens=False)
            self._end = tokenizer.encode(end, add_special_tokens=False)
        named = read_json(files.path / "tokenizer_config.json").get("tool_parser_type")
        wanted = infer_format(files.chat_template, names, named if isinstance(named, str) else None)
        try:
            self.tools = ToolFormat(wanted)
        except ValueError as error:
            log.warning("tool calls are taken for JSON", error=str(error))
            self.tools = ToolFormat(JSON_TOOLS)

    def thinking(self, prompt: bytes) -> Thinking | None:
        """Where the answer to `prompt` (uint32-LE) stands: inside of reasoning when the last mark in it begins one."""
        if self.think is None:
            return None
        opened = _last(prompt, pack_ids(self._begin)) > _last(prompt, pack_ids(self._end))
        return Thinking(self._begin, self._end, opened)


def _last(ids: bytes, part: bytes) -> int:
    """Where `part` begins for the last time in `ids`, both of four bytes each; -1 when it doesn't."""
    at = ids.rfind(part)
    while at % 4 and at >= 0:
        at = ids.rfind(part, 0, at + len(part) - 1)
    return at
