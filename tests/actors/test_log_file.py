"""Log files: bounded, rotated, and never a reason to fail."""

from pathlib import Path

from actors.log_file import LogFile


def test_it_is_rotated_and_old_ones_go(tmp_path: Path):
    file = LogFile(tmp_path / "log", most=20, keep=2)
    for i in range(10):
        file.write(b"line %04d\n" % i)
    file.close()
    names = {path.name: path.read_bytes().split()[1::2] for path in tmp_path.iterdir()}
    assert names == {"log": [], "log.1": [b"0008", b"0009"], "log.2": [b"0006", b"0007"]}
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_it_goes_on_where_it_was(tmp_path: Path):
    for line in (b"one\n", b"two\n"):
        file = LogFile(tmp_path / "log", most=100)
        file.write(line)
        file.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_folder_that_is_gone_loses_lines_only(tmp_path: Path):
    folder = tmp_path / "logs"
    folder.mkdir()
    file = LogFile(folder / "log", most=5)
    (folder / "log").unlink()
    folder.rmdir()
    file.write(b"a long line\n")
    file.write(b"another\n")
    file.close()
