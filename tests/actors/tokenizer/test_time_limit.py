"""Texts that take too long: interrupted where Python runs, the end of the process where it doesn't."""

import threading
import time

import pytest

from actors.tokenizer.chat_template import ChatTemplate, TemplateError
from actors.tokenizer.time_limit import TimeLimit, TooSlow

ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


def test_a_template_without_end_is_interrupted_and_the_thread_goes_on():
    limit = TimeLimit(least=0.1)
    template = ChatTemplate(ENDLESS, {})
    began = time.monotonic()
    with pytest.raises(TemplateError, match="too long"), limit.on(0):
        template.render([{"role": "user", "content": "x"}])
    assert time.monotonic() - began < 5
    with limit.on(0):
        assert sum(range(1000)) == 499500


def test_a_job_in_time_is_left_alone_also_when_its_limit_passes_later():
    limit = TimeLimit(least=0.1)
    for _ in range(3):
        with limit.on(0):
            pass
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        sum(range(100))


def test_larger_texts_get_longer():
    limit = TimeLimit(least=0.05)
    until = time.monotonic() + 0.5
    with limit.on(1 << 20):
        while time.monotonic() < until:
            sum(range(100))


def test_a_job_that_goes_on_regardless_ends_the_process():
    stuck = threading.Event()
    limit = TimeLimit(stuck.set, least=0.05, grace=0.2)
    with limit.on(0):
        while not stuck.is_set():
            try:
                stuck.wait(0.05)
            except TooSlow:
                continue
