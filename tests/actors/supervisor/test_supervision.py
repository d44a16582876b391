"""What the supervisor decides: readiness, and when the system must end and why."""

from actors.supervision import LAST_WORDS, SILENCE_LIMIT, Supervision
from protocol.messages import Alive, EngineStats, ModelCard, Ready


def started():
    table = Supervision(tokenizers=2, http_workers=1, start_timeout=60.0)
    for epoch, slot in enumerate(table.slots, start=1):
        table.started(slot, 1000 + epoch, epoch, now=0.0)
    return table


def make_ready(table):
    for slot in table.slots:
        card = ModelCard("demo", 8192) if slot.role == "engine" else None
        table.ready(Ready(slot.role, slot.index, slot.epoch, slot.pid, f"ipc://{slot.name}", card))


def test_ready_when_every_actor_is():
    table = started()
    assert {slot.name for slot in table.slots} == {"http0", "streamer", "tokenizer0", "tokenizer1", "engine"}
    assert not table.all_ready()
    make_ready(table)
    assert table.all_ready()
    assert table.card == ModelCard("demo", 8192)
    assert table.failure(1e6) is None


def test_reports_of_another_incarnation_are_dropped():
    table = started()
    engine = table.of_role("engine")[0]
    table.ready(Ready("engine", 0, engine.epoch + 1, 1))
    assert engine.state == "starting"
    table.alive(Alive("engine", 0, engine.epoch + 1, 1, stats=EngineStats(step=9)))
    assert table.engine.step == 0


def test_a_start_that_takes_too_long_fails_with_a_remedy():
    table = started()
    assert table.failure(59.0) is None
    assert "--start-timeout" in table.failure(61.0)


def test_a_death_is_judged_after_its_last_words():
    table = started()
    make_ready(table)
    engine = table.of_role("engine")[0]
    table.exited(engine, "was ended by SIGKILL", 5.0)
    assert table.failure(5.0) is None
    assert table.failure(5.0 + LAST_WORDS) == f"engine (pid {engine.pid}) was ended by SIGKILL"


def test_the_childs_own_text_goes_before_its_exit_code():
    table = started()
    engine = table.of_role("engine")[0]
    table.exited(engine, "exited with code 1", 5.0)
    engine.error = "can't start: no such architecture"
    assert table.failure(5.0) == "engine can't start: no such architecture"


def test_a_silent_actor_hangs_unless_the_machine_slept():
    table = started()
    make_ready(table)
    streamer = table.of_role("streamer")[0]
    streamer.asked = 10.0
    assert table.failure(10.0 + SILENCE_LIMIT) is None
    assert "streamer" in table.failure(10.1 + SILENCE_LIMIT)
    table.excuse(20.0)
    assert table.failure(10.1 + SILENCE_LIMIT) is None
    streamer.asked = 10.0
    table.alive(Alive("streamer", 0, streamer.epoch, 3, streams=2))
    assert table.failure(1e6) is None
    assert (streamer.streams, streamer.answered) == (2, 3)
