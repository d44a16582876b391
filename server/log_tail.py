"""The end of the system's log, as `actors.log_file` keeps it in the run directory."""

from pathlib import Path

MOST = 64 << 10  # bytes read at once


def read_tail(path: Path, offset: int) -> tuple[int, list[str]]:
    """Whole lines behind byte `offset`, and where they end. Of much that is new, or when the file was begun anew, only
    the last `MOST` bytes are read."""
    try:
        with open(path, "rb") as file:
            end = file.seek(0, 2)
            begin = offset if end - MOST <= offset <= end else max(0, end - MOST)
            file.seek(begin)
            data = file.read(MOST)
    except OSError:
        return offset, []
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].decode(errors="replace").splitlines()
    if begin != offset and begin > 0:
        lines = lines[1:]  # its beginning was cut off
    return begin + whole, lines
