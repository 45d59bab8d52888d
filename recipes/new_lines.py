"""Following a file that another process writes line by line."""

from pathlib import Path


class NewLines:
    """Call it for the lines that were added to a file since the last call; a half-written one waits for the next."""

    def __init__(self, path: Path):
        self._path, self._offset = path, 0

    def __call__(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            written = file.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines(keepends=True)
