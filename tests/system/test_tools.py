"""The commands that look at running servers: ps, top, bench, stop; and shell completion."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import RunningServer, clean_environment


def callboard(*arguments: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "server.cli", *arguments],
        env=clean_environment() | {"CALLBOARD_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_ps_and_top_show_a_server(server: RunningServer):
    shown = callboard("ps", home=server.home)
    assert shown.returncode == 0, shown.stderr
    assert server.name in shown.stdout
    assert server.url in shown.stdout
    shown = callboard("top", "--once", home=server.home)
    assert shown.returncode == 0, shown.stderr
    for word in (server.name, "engine", "tokenizer1", "hit rate", "tokens/s"):
        assert word in shown.stdout


def test_bench_measures_a_running_server(server: RunningServer, tmp_path: Path):
    output = tmp_path / "bench.json"
    arguments = ["--prompts", "300", "--batches", "1,4", "--tokens", "6", "--json", str(output)]
    shown = callboard("bench", *arguments, home=server.home)
    assert shown.returncode == 0, shown.stderr
    results = json.loads(output.read_text())
    assert results["model"] == "tiny"
    [speed], [hit] = results["prompts"], results["prefixes"]
    assert speed["tokens"] == 300
    assert hit["cached_tokens"] == 256
    assert [batch["streams"] for batch in results["batches"]] == [1, 4]
    assert all(batch["per_second"] > 0 for batch in results["batches"])


def test_orders_about_models_are_for_a_server_of_several(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from server.cli import main

    monkeypatch.setenv("CALLBOARD_HOME", str(server.home))
    for action in ("load", "unload", "pin", "unpin"):
        assert main([action, "tiny"]) == 1
        text = f"callboard: {server.name} serves tiny alone; `callboard serve A B` serves several models\n"
        assert capsys.readouterr().err == text
    for command in (["chat", "other"], ["bench", "--model", "other"]):
        assert main(command) == 1
        assert capsys.readouterr().err == "callboard: there is no model 'other'; there are tiny\n"


def test_without_a_server_they_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from server.cli import main

    monkeypatch.setenv("CALLBOARD_HOME", str(tmp_path))
    assert main(["ps"]) == 0
    assert "No server is running" in capsys.readouterr().out
    for command in (["top"], ["stop"], ["stop", "--now"], ["load", "x"], ["unload", "x"], ["pin", "x"]):
        assert main(command) == 1
        assert "no server is running" in capsys.readouterr().err
    assert main(["stop", "--all"]) == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]):
    from server.cli import main

    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("serve", "doctor", "restart-engine", "max-num-seqs"):
        assert word in script


def test_ls_and_rm_look_after_models(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from server.cli import main

    monkeypatch.setenv("CALLBOARD_CACHE_DIR", str(tmp_path / "ours"))
    folder = tmp_path / "ours" / "models" / "mine"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).symlink_to(tiny_model / name)
    assert main(["ls"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mine")]
    assert "can't" not in line
    (folder / "tokenizer.json").unlink()
    main(["ls"])
    assert "can't be served" in capsys.readouterr().out
    assert main(["rm", "other"]) == 1
    assert main(["rm", "mine", "--yes"]) == 0
    assert not folder.exists()


def test_pull_says_why_a_model_does_not_come(capsys: pytest.CaptureFixture[str]):
    from server.cli import main

    assert main(["pull", "no/such model"]) == 1
    assert "no folder" in capsys.readouterr().err
