"""What a request must hold to be taken."""

from typing import Any

import pytest

from actors.streamer.requests import find_fault
from protocol.messages import Generate, SamplingParams
from protocol.sampling import MAX_TOOLS, InvalidParam


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]


def test_so_many_tools_and_no_more():
    find_fault(Generate(1, SamplingParams(), prompt="x", tools=tools(MAX_TOOLS)), 0)
    with pytest.raises(InvalidParam, match="at most 128 tools, not 129") as caught:
        find_fault(Generate(1, SamplingParams(), prompt="x", tools=tools(129)), 0)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("tool", [{}, {"function": "f"}, {"function": {"name": ""}}, {"function": {"name": 5}}])
def test_a_tool_without_a_name_is_refused(tool: dict[str, Any]):
    with pytest.raises(InvalidParam, match=r"tools\[2\] must be a function with a name"):
        find_fault(Generate(1, SamplingParams(), prompt="x", tools=[*tools(2), tool]), 0)
