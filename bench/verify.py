"""Run named checks of what the project promises; each prints what it measured and PASS or FAIL.

    python bench/verify.py NAME…      run these, one after the other
    python bench/verify.py --list     say what there is

A check takes at most ten minutes, those in LONGER aside (the soak: SOAK_SECONDS, 1200). Its figures go to
`bench/results/NAME.json`.
Exit code 1 when one fails.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.ask import post
from bench.checks import (
    answers,
    block_disk,
    blocks,
    clients,
    crowds,
    dashboard,
    dashboard_cost,
    dashboard_figures,
    dashboard_models,
    deaths,
    doctor,
    fair_clients,
    fairness,
    floods,
    fuzz,
    hostile,
    interference,
    kinds,
    kv_events,
    latency,
    limits,
    loads,
    loop,
    lora,
    metrics,
    models,
    neighbours,
    node,
    peers,
    prefix_trouble,
    prefixes,
    project,
    recovery,
    refusals,
    restores,
    retries,
    rooms,
    same,
    several_clients,
    soaks,
    structured,
    surroundings,
)
from bench.checks.report import Report
from bench.facts import machine_facts, without_paths
from bench.faults.inject import Faults
from bench.harness import ROOT, RunningServer, callboard, clean_environment, exit_on_sigterm, kill_all
from bench.houses import house_of, states
from bench.load.plan import Plan
from bench.models import DEMO, demo_folder, other_tiny, tiny_model
from bench.peers import PEERS
from server.models.cache import cache_root

LIMIT = 600.0  # seconds a check may take
SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "1200"))
RESULTS = ROOT / "bench" / "results"

Check = Callable[[Report], object]  # what a check returns is for others who call it
ServerCheck = Callable[[Report, RunningServer], object]


def on_demo(check: ServerCheck) -> Check:
    """Run a check on a server with the demo model."""

    def run(report: Report) -> None:
        with RunningServer(DEMO, ready_seconds=300) as server:
            check(report, server)

    return run


def on_tiny(check: ServerCheck, *arguments: str) -> Check:
    """Run a check on a server with the tiny model."""

    def run(report: Report) -> None:
        with RunningServer(tiny_model(), *arguments) as server:
            check(report, server)

    return run


def several_models(report: Report) -> None:
    """Three tiny models and the demo model, 200 requests."""
    with tempfile.TemporaryDirectory() as folder:
        models.several(report, tiny_model(), demo_folder(), Path(folder), requests=200, threads=24)


def stress(via: str) -> Check:
    """256 streams of 64 tokens with distinct prompts of 220 tokens, all at once."""
    plan = Plan(via=via, streams=256, requests=256, prompt_tokens=220, max_tokens=64, vocab_size=49_152)
    return on_tiny(lambda report, server: crowds.stress(report, server, plan))


def crowd(temperature: float = 0.0, top_p: float = 1.0) -> Plan:
    """256 streams of 64 tokens over HTTP with distinct prompts of 220 tokens, all at once."""
    return Plan(
        via="http",
        streams=256,
        requests=256,
        prompt_tokens=220,
        max_tokens=64,
        vocab_size=49_152,
        temperature=temperature,
        top_p=top_p,
    )


def bare(plan: Plan, *, bar: float | None) -> Check:
    """A crowd against the bare limit."""
    return lambda report: limits.bare(report, tiny_model(), plan, rounds=5, bar=bar)


def against_peers(plan: Plan, *, bar: float, ttft: bool) -> Check:
    """A crowd against every peer."""
    return lambda report: peers.against_peers(report, tiny_model(), plan, list(PEERS), bar=bar, ttft=ttft)


def crowd_in_motion(temperature: float) -> Plan:
    """512 requests of many lengths, 256 at once over ZeroMQ, a fifth of which are cancelled somewhere."""
    return Plan(
        via="zmq",
        streams=256,
        requests=512,
        prompt_tokens=1,
        max_tokens=1,
        prompt_lengths="uniform:4:300",
        output_lengths="uniform:16:64",
        temperature=temperature,
        aborts=0.2,
    )


def parity_256(report: Report, server: RunningServer) -> None:
    """Greedy and sampled."""
    for temperature in (0.0, 0.8):
        loads.parity(report, server, tiny_model(), crowd_in_motion(temperature))


def streams_512(report: Report, server: RunningServer) -> None:
    """Connections, and streams both ways."""
    crowds.connections(report, server, 512)
    crowds.raw_connections(report, server, 512)
    loads.many(report, server, 512)


def compared(report: Report) -> None:
    """Everything that `make compare` runs."""
    from bench import compare  # loads matplotlib, which the other checks have no need of

    compare.compare_all(report, compare.WORKLOADS, list(PEERS), compare.FOLDER, held=True)


def vanish_http(report: Report, server: RunningServer) -> None:
    """200 streams, and twenty requests without streaming."""
    crowds.vanish_http(report, server, streams=200, max_tokens=150)
    crowds.vanish_unstreamed(report, server, 20)


def engine_faults(how: signal.Signals) -> Check:
    """200 streams, and three deaths or hangs of the engine."""

    def check(report: Report, server: RunningServer) -> None:
        recovery.engine_faults(report, server, tiny_model(), streams=200, tokens=150, times=3, how=how)

    return on_tiny(check)


def front_death(actor: str) -> Check:
    """Kill the streamer or an HTTP worker of two under 200 streams."""
    return on_tiny(lambda report, server: recovery.front_deaths(report, server, actor, 100), "--http-workers", "2")


def restart_engine(report: Report, server: RunningServer) -> None:
    """`callboard restart-engine` under 50 streams."""
    command = [str(callboard()), "restart-engine", "--name", server.name]
    environment = clean_environment() | {"CALLBOARD_HOME": str(server.home)}

    def ask() -> None:
        subprocess.run(command, env=environment, check=True, timeout=60)

    recovery.replaced_on_demand(report, server, streams=50, tokens=150, ask=ask)


def soak(report: Report) -> None:
    """128 streams and a fault every 10 s. Blocks in memory have a budget that is full soon, so that memory has to be
    flat from then on."""
    arguments = ("--http-workers", "2", "--tokenizers", "2", "--cache-memory-mb", "16")
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder))
        with RunningServer(tiny_model(), *arguments, environment=faults.environment()) as server:
            soaks.soak(report, server, faults, tiny_model(), streams=128, tokens=60, every=10.0, seconds=SOAK_SECONDS)


def poison(report: Report) -> None:
    """Poison requests beside 50 streams."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), *recovery.poison_faults())
        with RunningServer(tiny_model(), environment=faults.environment()) as server:
            recovery.poison(report, server, tiny_model(), streams=50, tokens=300)
            recovery.decoding_poison(report, server, tiny_model(), streams=50, tokens=300)


def kill_kinds(report: Report) -> None:
    """Rows of every kind, three deaths of the engine, and two at unlucky moments."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), *kinds.row_faults(Path(folder)))
        with RunningServer(tiny_model(), environment=faults.environment()) as server:
            kinds.kinds(report, server, tokens=200, kills=3, each=2)
            kinds.unlucky_moments(report, server, Path(folder), 150)


def bad_machine(report: Report) -> None:
    """A disk that is full or slow, a clock that jumps, and frames that are cut."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder))
        with RunningServer(tiny_model(), environment=faults.environment()) as server:
            surroundings.disks(report, server, faults, tiny_model(), streams=24, tokens=300)
            surroundings.clock_jump(report, server, faults, streams=24, tokens=600)
            surroundings.cut_frames(report, server, faults, tiny_model(), streams=24, tokens=100)


def lora_check(report: Report) -> None:
    """What adapters cost a step, and that clients get those they ask for."""
    lora.step_time(report, "tiny", rows=256, rounds=7, bars={"base": 1.1})
    lora.step_time(report, "demo", rows=16, rounds=3, bars={"base": 1.1, "four adapters": 1.5})
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningServer(tiny_model(), *lora.arguments(tiny_model(), Path(folder))) as server,
    ):
        lora.by_openai(report, server)
        lora.over_zmq(report, server, tokens=300)


def dashboard_buttons(report: Report) -> None:
    """Every button in a real browser, on a server that wants a key; pictures go to the cache folder."""
    pictures = cache_root() / "dashboard-pictures"
    with RunningServer(tiny_model(), "--api-key", "open sesame") as server:
        dashboard.buttons(report, server, "open sesame", pictures)
    two = {"alpha": tiny_model(), "beta": other_tiny(101)}
    with house_of(two, "--api-key", "open sesame") as server:
        dashboard_models.models(report, server, "open sesame", pictures)


def clients_at_once(report: Report) -> None:
    """All client libraries at once on three models, of which two fit."""
    models: dict[str, str | Path] = {"alpha": tiny_model(), "beta": other_tiny(101), "demo": DEMO}
    with house_of(models, "--models-memory", "3", ready_seconds=300) as server:
        several_clients.clients_at_once(report, server, [*models], [*several_clients.LIBRARIES])
        loads = {name: state["loads"] for name, state in states(server).items()}
    report.measured("loads", loads)


def shown_metrics(report: Report) -> None:
    """The metrics of a server of one model and of one of two, with figures in them."""
    two = {"alpha": tiny_model(), "beta": other_tiny(101)}
    with RunningServer(tiny_model(), name="one") as one, house_of(two, name="two") as house:
        for server in (one, house):
            post(f"{server.url}/v1/completions", {"prompt": "Hi", "max_tokens": 3})
            metrics.documented(report, server)
            metrics.clean(report, server)


def events_of_blocks(report: Report) -> None:
    """A subscriber follows a server's prefix blocks."""
    port = kv_events.two_free_ports()
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningServer(
            tiny_model(), "--kv-events", f"127.0.0.1:{port}", *lora.arguments(tiny_model(), Path(folder))
        ) as server,
    ):
        kv_events.kv_events(report, server, port, lora.NAMES)


KINDS: list[tuple[str, int | None]] = [
    ("plain", None),
    ("sliding", None),
    ("plain", 300),
    ("recurrent", None),
    ("list", None),
    ("hybrid", None),
    ("quantized", None),
    ("chunked", None),
]
BORDERS = [255, 256, 257, 511, 512, 513, 767, 768, 769, 1000]

CHECKS: dict[str, Check] = {
    "fresh-clone": project.fresh_clone,
    "fresh-test": project.fresh_test,
    "paris": on_demo(answers.paris),
    "stop-strings": on_demo(answers.stop_strings),
    "bad-stop": on_tiny(refusals.bad_stop),
    "lone-surrogate": on_tiny(refusals.lone_surrogate),
    "connections-256": on_tiny(lambda report, server: crowds.connections(report, server, 256)),
    "stress-256-http": stress("http"),
    "stress-256-zmq": stress("zmq"),
    "vanish-http": on_tiny(vanish_http),
    "vanish-zmq": on_tiny(lambda report, server: crowds.vanish_zmq(report, server, 200, 150)),
    "tokenize-itl": on_tiny(
        lambda report, server: interference.tokenize_itl(
            report, server, streams=16, tokens=200_000, rounds=12, seconds=4.0
        )
    ),
    "kill-supervisor": on_tiny(lambda report, server: deaths.kill_supervisor(report, server, 8), "--http-workers", "2"),
    "kill-engine": engine_faults(signal.SIGKILL),
    "stop-engine": engine_faults(signal.SIGSTOP),
    "kill-restore": on_tiny(
        lambda report, server: restores.restored(report, server, tiny_model(), streams=64, tokens=600)
    ),
    "kill-tokenizers": on_tiny(
        lambda report, server: recovery.tokenizer_deaths(report, server, streams=200, tokens=30, rounds=3),
        *("--tokenizers", "2"),
    ),
    "kill-streamer": front_death("streamer"),
    "kill-http": front_death("http"),
    "restart-engine": on_tiny(restart_engine),
    "poison": poison,
    "kill-kinds": kill_kinds,
    "bad-machine": bad_machine,
    "malformed": on_tiny(
        lambda report, server: hostile.malformed(report, server, tiny_model(), count=20_000, streams=50, tokens=200)
    ),
    "vanish-1000": on_tiny(lambda report, server: hostile.vanishing(report, server, 1000)),
    "two-servers": lambda report: neighbours.two_servers(report, tiny_model()),
    "step-overhead": lambda report: loop.step_overhead(report, [1, 32, 128, 256], [64], rounds=9),
    "joins": lambda report: loop.joins(report, tiny_model(), rows=64, tokens=32_000),
    "mixed": lambda report: loop.mixed(report, tiny_model(), long=16_000, rows=63, short=300, rounds=9),
    "fairness": on_tiny(
        lambda report, server: fairness.fairness(report, server, streams=32, tokens=16_000, target_ms=100, rounds=6),
        *("--decode-stall-target-ms", "100"),
    ),
    "behind-long": on_demo(
        lambda report, server: fairness.behind_long(report, server, tokens=6000, deep=4600, most=10.0)
    ),
    "same-tokens": on_tiny(lambda report, server: same.same_tokens(report, server, tiny_model(), 100, 256)),
    "low-memory": lambda report: same.low_memory(report, tiny_model(), streams=64, tokens=600),
    "flood": lambda report: floods.flood(report, tiny_model(), requests=2000, rounds=8, rest=32),
    "bare-256": bare(crowd(), bar=0.85),
    "sampled-256": bare(crowd(temperature=0.7, top_p=0.9), bar=None),
    "peers-256": against_peers(crowd(), bar=3.5, ttft=True),
    "peers-sampled-256": against_peers(crowd(temperature=0.7, top_p=0.9), bar=5.0, ttft=False),
    "single-stream": on_demo(
        lambda report, server: limits.single_stream(report, server, demo_folder(), tokens=64, rounds=5, bar=0.95)
    ),
    "scaling": on_demo(
        lambda report, server: limits.scaling(report, server, bars={5: 2.5, 16: 5.0}, tokens=48, rounds=3)
    ),
    "lora": lora_check,
    "prefix-ttft": lambda report: prefixes.ttft(report, DEMO, 4096, bars=(0.05, 0.10)),
    "prefix-restore": lambda report: prefixes.restore(report, demo_folder(), tokens=4096, rounds=5, bar=0.6),
    "prefix-shared": on_tiny(lambda report, server: prefixes.shared(report, server, users=32, tokens=2048)),
    "prefix-hits": on_tiny(prefixes.hits),
    "prefix-chat": on_tiny(lambda report, server: prefixes.chat(report, server, turns=10, tokens=600)),
    "prefix-cost": lambda report: prefixes.cost(report, tiny_model(), rows=32, tokens=600, budget=300, rounds=4),
    "prefix-itl": lambda report: prefixes.itl(
        report, tiny_model(), streams=32, tokens=16_384, target_ms=100, rounds=4, held=True
    ),
    "prefix-same": lambda report: prefixes.same(
        report, [*KINDS, (str(tiny_model()), None)], lengths=BORDERS, others=64
    ),
    "prefix-same-demo": lambda report: prefixes.same(
        report, [(str(demo_folder()), None)], lengths=BORDERS[:6], others=64, longest=24
    ),
    "prefix-kill": lambda report: prefix_trouble.kills(report, tiny_model(), rounds=10),
    "prefix-trouble": lambda report: prefix_trouble.trouble(report, tiny_model()),
    "clients": on_tiny(lambda report, server: clients.clients(report, server, cache_root() / "npm-clients")),
    "clients-at-once": clients_at_once,
    "latency": lambda report: latency.latency(report, tiny_model(), requests=300),
    "node": on_tiny(lambda report, server: node.node_client(report, server, cache_root() / "node-example")),
    "fair-clients": on_tiny(
        lambda report, server: fair_clients.fair_clients(report, server, seats=8, flood=300, tokens=40, asked=12),
        *("--max-num-seqs", "8", "--tokenizers", "1"),
    ),
    "retries": on_tiny(
        lambda report, server: retries.retries(report, server, cache_root() / "npm-clients", running=2, waiting=32),
        *("--max-num-seqs", "2"),
    ),
    "schemas": on_demo(lambda report, server: structured.schema_outputs(report, server, 100, 200)),
    "mixed-options": on_demo(
        lambda report, server: structured.mixed_options(
            report, server, [*range(structured.MIXES)], 40, 0.6, rounds=2, alone=8, most_steps=1.6
        )
    ),
    "compiling": on_demo(lambda report, server: structured.compiling(report, server, tokens=150, factor=1.3)),
    "texts": project.text_properties,
    "fuzz": on_tiny(lambda report, server: fuzz.schemathesis_finds_nothing(report, server, 120)),
    "fuzz-embed": on_tiny(
        lambda report, server: fuzz.schemathesis_finds_nothing(report, server, 120), "--task", "embed"
    ),
    "fuzz-rerank": on_tiny(
        lambda report, server: fuzz.schemathesis_finds_nothing(report, server, 120), "--task", "rerank"
    ),
    "check": project.make_check,
    "parity-256": on_tiny(parity_256),
    "engine-busy": on_tiny(
        lambda report, server: loads.engine_busy(
            report,
            server,
            Plan(via="http", streams=256, requests=256, prompt_tokens=32, max_tokens=400),
            seconds=8,
            bar=loads.OUTSIDE_MODEL,
        )
    ),
    "streams-512": on_tiny(streams_512),
    "harness": lambda report: loads.harness_limit(report, 1000, 200, least=10_000),
    "compare": compared,
    "rooms": on_tiny(rooms.rooms, "--http-workers", "2", "--tokenizers", "2"),
    "block-kills": lambda report: blocks.kills(report, rounds=200),
    "block-damage": blocks.damage,
    "block-disk": lambda report: block_disk.disk(report, blocks=10_000),
    "dashboard": dashboard_buttons,
    "dashboard-figures": on_tiny(
        lambda report, server: dashboard_figures.figures(report, server, streams=128, rounds=4, tokens=64),
        "--http-workers",
        "2",
    ),
    "dashboard-cost": on_tiny(lambda report, server: dashboard_cost.cost(report, server, streams=128, seconds=6.0)),
    "metrics": shown_metrics,
    "kv-events": events_of_blocks,
    "doctor": lambda report: doctor.doctor(report, tiny_model()),
    "models": several_models,
    "soak": soak,
}
LONGER = {
    "soak": SOAK_SECONDS + 600.0,
    "compare": 2400.0,
    "step-overhead": 1200.0,
    "peers-sampled-256": 1500.0,
}  # checks that may take longer than LIMIT, in seconds


def give_up(name: str, limit: float) -> None:
    """End this process, and the servers it started, when a check doesn't come to an end."""
    print(f"FAIL {name}: not done within {limit:g} s", flush=True)
    kill_all()
    for child in psutil.Process().children(recursive=True):  # peers, and processes that measure
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(1)


def run_check(name: str) -> bool:
    """Run one check, print and write down what it found; whether it passed."""
    print(name, flush=True)
    report = Report(lambda line: print(line, flush=True))
    limit = LONGER.get(name, LIMIT)
    watchdog = threading.Timer(limit, give_up, [name, limit])
    watchdog.daemon = True
    watchdog.start()
    began = time.monotonic()
    try:
        CHECKS[name](report)
    except Exception as error:
        traceback.print_exc()
        report.expect(False, f"the check ran to its end ({type(error).__name__})")
    finally:
        watchdog.cancel()
    passed = not report.failures
    seconds = time.monotonic() - began
    result = {
        "check": name,
        "passed": passed,
        "command": f"make verify-{name}",
        "seconds": round(seconds, 1),
        "figures": report.figures,
        "failures": report.failures,
        "machine": machine_facts(),
    }
    RESULTS.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    (RESULTS / f"{name}.json").write_text(without_paths(text) + "\n")
    print(f"{'PASS' if passed else 'FAIL'} {name} ({seconds:.1f} s)", flush=True)
    return passed


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of all checks")
    args = parser.parse_args()
    if args.list:
        print("\n".join(CHECKS))
        return 0
    unknown = [name for name in args.names if name not in CHECKS]
    if unknown or not args.names:
        parser.error(f"no check called {', '.join(unknown)}" if unknown else "name a check, or see --list")
    exit_on_sigterm()
    results = [run_check(name) for name in args.names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
