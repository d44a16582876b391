"""Who wants to see the prefix blocks: one question for all that look on, and none that stays open."""

from actors.streamer.prefix_calls import FRESH, PrefixCalls
from protocol.errors import LOADING
from protocol.figures import PrefixChain, PrefixTree
from protocol.messages import CallFailed, Prefixes

TREE = PrefixTree([PrefixChain("00", -1, 0, 256)])


class Engine:
    """What a `PrefixCalls` knows of the engine."""

    ready = True
    epoch = 4
    asked = 0

    def tell_prefixes(self) -> None:
        self.asked += 1


def test_many_clients_cost_one_look():
    engine, sent = Engine(), []
    calls = PrefixCalls(engine, lambda client, answer: sent.append((client, answer)))
    calls.ask(b"a", 1, 10.0)
    calls.ask(b"b", 2, 10.1)
    assert (engine.asked, sent) == (1, [])
    calls.take(TREE, 10.2)
    assert sent == [(b"a", Prefixes(1, TREE)), (b"b", Prefixes(2, TREE))]
    calls.ask(b"a", 3, 10.2 + FRESH / 2)
    assert (engine.asked, sent[2:]) == (1, [(b"a", Prefixes(3, TREE))])
    calls.ask(b"a", 4, 10.3 + FRESH)
    assert engine.asked == 2
    engine.epoch = 5
    calls.look()
    assert isinstance(sent[-1][1], CallFailed)
    assert sent[-1][1].ref == 4
    calls.ask(b"a", 5, 10.3)  # fresh, but of another engine
    assert engine.asked == 3


def test_without_an_engine_it_says_so_at_once():
    engine, sent = Engine(), []
    engine.ready = False
    calls = PrefixCalls(engine, lambda client, answer: sent.append(answer))
    calls.ask(b"a", 1, 10.0)
    assert [(answer.ref, answer.code) for answer in sent] == [(1, LOADING)]
    assert engine.asked == 0
