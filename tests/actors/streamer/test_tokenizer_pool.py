"""Which tokenizer gets which job, and what happens to jobs of one that is gone. Sockets are real."""

import zmq

from actors.streamer.tokenizer_pool import LONG_JOB, MAX_LONG, MAX_SHORT, REPEATS, Job, TokenizerPool
from protocol.codec import encode, job_codec
from protocol.messages import ActorState, Encoded
from protocol.sockets import bind_router


class Loop:
    """The part of `Actor` that the pool needs."""

    def __init__(self):
        self.context = zmq.Context()
        self.handlers = {}

    def add_socket(self, socket, handler):
        self.handlers[socket] = handler

    def remove_socket(self, socket):
        del self.handlers[socket]
        socket.close(linger=0)

    def run_once(self):
        turns = iter([False, True])
        self.run_until(lambda: next(turns))

    def run_until(self, condition):
        poller = zmq.Poller()
        for socket in self.handlers:
            poller.register(socket, zmq.POLLIN)
        while not condition():
            events = poller.poll(5000)
            assert events, "nothing came"
            for socket, _ in events:
                self.handlers[socket]()


class Tokenizer:
    """The other end of one tokenizer's socket."""

    def __init__(self, context, tmp_path, index, epoch):
        self.state = ActorState(f"t{index}", "tokenizer", index, 1, "ready", epoch, f"ipc://{tmp_path}/t{epoch}")
        self.socket = bind_router(context, self.state.endpoint)
        self.socket.rcvtimeo = 5000

    def take(self):
        peer, frame = self.socket.recv_multipart()
        return peer, job_codec.decode(frame)

    def answer(self, peer, job, epoch=None):
        self.socket.send_multipart([peer, encode(Encoded(epoch or job.epoch, job.job, b"\1\0\0\0"))])


def start(tmp_path, count=1):
    loop = Loop()
    pool = TokenizerPool(loop)
    tokenizers = [Tokenizer(loop.context, tmp_path, i, i + 1) for i in range(count)]
    return loop, pool, tokenizers


def stop(loop):
    loop.context.destroy(linger=0)


def job(done, text="x", size=1):
    return Job(size, lambda result: done.append((text, result)), text=text)


def test_jobs_are_given_again_when_a_frame_could_not_be_read(tmp_path):
    loop, pool, (tokenizer,) = start(tmp_path)
    pool.follow([tokenizer.state])
    done = []
    pool.submit(job(done, "once more"))
    peer, first = tokenizer.take()
    tokenizer.socket.send_multipart([peer, b"\x93"])  # its result, cut short
    loop.run_once()
    peer, second = tokenizer.take()
    assert (second.text, second.job != first.job) == ("once more", True)
    tokenizer.socket.send_multipart([peer, encode(Encoded(1, 0, code="internal_error"))])  # it could not read the job
    loop.run_once()
    peer, third = tokenizer.take()
    tokenizer.answer(peer, second)
    tokenizer.answer(peer, third)
    loop.run_until(lambda: done)
    assert [text for text, _ in done] == ["once more"]
    stop(loop)


def test_a_job_that_can_never_be_read_is_failed(tmp_path):
    loop, pool, (tokenizer,) = start(tmp_path)
    pool.follow([tokenizer.state])
    done = []
    pool.submit(job(done))
    for _ in range(REPEATS + 1):
        peer, _ = tokenizer.take()
        tokenizer.socket.send_multipart([peer, b""])
        loop.run_once()
    assert done[0][1].code == "tokenizer_lost"
    stop(loop)


def test_results_reach_who_asked(tmp_path):
    loop, pool, (tokenizer,) = start(tmp_path)
    done = []
    pool.submit(job(done, "early"))
    assert not pool.known
    assert pool.waiting == 1
    pool.follow([tokenizer.state])
    peer, message = tokenizer.take()
    assert (message.text, message.epoch) == ("early", 1)
    tokenizer.answer(peer, message)
    loop.run_until(lambda: done)
    assert done[0][1].ids == b"\1\0\0\0"
    stop(loop)


def test_work_is_spread_and_bounded(tmp_path):
    loop, pool, tokenizers = start(tmp_path, 2)
    pool.follow([t.state for t in tokenizers])
    for i in range(10):
        pool.submit(job([], str(i)))
    assert pool.waiting == 10 - 2 * MAX_SHORT
    for tokenizer in tokenizers:
        assert len([tokenizer.take() for _ in range(MAX_SHORT)]) == MAX_SHORT
    stop(loop)


def test_long_texts_have_a_lane_of_their_own(tmp_path):
    loop, pool, (tokenizer,) = start(tmp_path)
    done = []
    for i in range(3):
        pool.submit(job(done, f"long{i}", LONG_JOB + 1))
    for i in range(4):
        pool.submit(job(done, f"short{i}"))
    pool.follow([tokenizer.state])
    first = [tokenizer.take() for _ in range(MAX_SHORT + MAX_LONG)]
    assert [(m.text, m.long) for _, m in first] == [("short0", False), ("short1", False), ("long0", True)]
    tokenizer.answer(*first[2])
    loop.run_until(lambda: len(done) == 1)
    assert tokenizer.take()[1].text == "long1"
    tokenizer.answer(*first[0])
    loop.run_until(lambda: len(done) == 2)
    assert tokenizer.take()[1].text == "short2"
    stop(loop)


def test_the_texts_of_a_dead_tokenizer_go_to_its_successor(tmp_path):
    loop, pool, (first,) = start(tmp_path)
    done = []
    pool.follow([first.state])
    for i in range(MAX_SHORT + 1):
        pool.submit(job(done, str(i)))
    first.take()
    pool.follow([])
    assert pool.known
    assert done == []
    second = Tokenizer(loop.context, tmp_path, 0, 2)
    pool.follow([second.state])
    suspect = second.take()
    assert suspect[1].text == "0"  # the first was at it when it died: it is tried alone
    assert not second.socket.poll(50)
    second.answer(*suspect, epoch=1)
    second.answer(*suspect)
    loop.run_until(lambda: len(done) == 1)
    for text in ("1", "2"):
        peer, message = second.take()
        assert message.text == text
        second.answer(peer, message)
    loop.run_until(lambda: len(done) == 3)
    assert not any(result.code for _, result in done)
    stop(loop)


def test_a_text_that_two_tokenizers_died_of_fails_alone(tmp_path):
    loop, pool, (first,) = start(tmp_path)
    done = []
    pool.follow([first.state])
    for text in ("bad", "a", "b"):
        pool.submit(job(done, text))
    assert first.take()[1].text == "bad"
    pool.follow([])
    second = Tokenizer(loop.context, tmp_path, 0, 2)
    pool.follow([second.state])
    assert second.take()[1].text == "bad"
    pool.follow([])
    ((text, result),) = done
    assert (text, result.code) == ("bad", "tokenizer_lost")
    assert "2 tokenizer processes" in result.message
    third = Tokenizer(loop.context, tmp_path, 0, 3)
    pool.follow([third.state])
    for _ in range(2):
        peer, message = third.take()
        third.answer(peer, message)
    loop.run_until(lambda: len(done) == 3)
    assert {text for text, result in done if not result.code} == {"a", "b"}
    stop(loop)


def test_a_suspect_waits_for_a_tokenizer_that_has_nothing_else(tmp_path):
    loop, pool, (first, other) = start(tmp_path, 2)
    done = []
    pool.follow([first.state, other.state])
    for text in ("bad", "a", "b", "c"):
        pool.submit(job(done, text))
    held = [other.take() for _ in range(2)]
    assert first.take()[1].text == "bad"
    pool.follow([other.state])
    pool.submit(job(done, "d"))
    assert not other.socket.poll(50)
    for one in held:
        other.answer(*one)
    loop.run_until(lambda: len(done) == 2)
    assert other.take()[1].text == "bad"
    assert not other.socket.poll(50)
    stop(loop)


def test_a_cancelled_text_leaves_its_lane(tmp_path):
    loop, pool, (tokenizer,) = start(tmp_path)
    done = []
    jobs = [job(done, str(i)) for i in range(4)]
    for one in jobs:
        pool.submit(one)
    pool.cancel(jobs[1])
    pool.follow([tokenizer.state])
    pool.cancel(jobs[0])
    for text in ("0", "2"):
        peer, message = tokenizer.take()
        assert message.text == text
        tokenizer.answer(peer, message)
    loop.run_until(lambda: done)
    pool.follow([])
    second = Tokenizer(loop.context, tmp_path, 0, 2)
    pool.follow([second.state])
    peer, message = second.take()
    second.answer(peer, message)
    loop.run_until(lambda: len(done) == 2)
    assert [text for text, _ in done] == ["2", "3"]
    stop(loop)
