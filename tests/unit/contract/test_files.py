"""A file that is replaced: the old one or the new one, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshrl.contract.files import replace_file


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "book.json"
    replace_file(path, "old ü")
    assert path.read_text(encoding="utf-8") == "old ü"
    replace_file(path, b"bytes\n")
    assert path.read_bytes() == b"bytes\n"
    assert list(tmp_path.iterdir()) == [path]

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, "new")
    assert path.read_bytes() == b"bytes\n"
