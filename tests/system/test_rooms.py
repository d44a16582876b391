"""Who may import whom, and who has MLX loaded."""

from pathlib import Path

import pytest

from bench.checks import rooms
from bench.checks.report import Report
from bench.harness import RunningServer


def test_every_file_keeps_to_its_room_and_only_the_engine_has_mlx(server: RunningServer, report: Report):
    rooms.rooms(report, server)
    assert report.failures == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("protocol/x.py", "import psutil"),
        ("protocol/x.py", "from actors.base import Actor"),
        ("cache_store/x.py", "def f():\n    import server.app"),
        ("actors/streamer/x.py", "import mlx.core as mx"),
        ("actors/x.py", "from server import settings"),
        ("server/app.py", "from actors.supervisor import Supervisor"),
        ("server/app.py", "import mlx_lm"),
    ],
)
def test_an_import_across_rooms_is_found(path: str, source: str):
    assert len(rooms.broken_imports(Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("protocol/x.py", "import json, zmq\nimport msgspec\nfrom protocol import codec"),
        ("actors/engine/x.py", "import mlx.core as mx\nfrom mlx_lm import load"),
        ("server/cli_serve.py", "from actors.supervisor import Supervisor"),
        ("server/app.py", "import starlette\nfrom . import sse"),
    ],
)
def test_an_import_inside_its_room_is_allowed(path: str, source: str):
    assert rooms.broken_imports(Path(path), source) == []
