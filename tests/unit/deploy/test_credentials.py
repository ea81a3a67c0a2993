"""`meshrl credentials`: what is made before a run's services start where its directory is not."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from meshrl.cli.deploy import credentials
from meshrl.rpc.credentials import MeshRole, read_verifiers, sha256
from meshrl.rpc.identity import TokenStore


def made(folder: Path, *options: str) -> dict[str, str]:
    done = CliRunner().invoke(credentials, [str(folder), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_each_role_gets_its_own_and_the_operator_all(tmp_path: Path) -> None:
    found = made(tmp_path, "--apart")
    roles = read_verifiers(tmp_path / "trainer" / "verifiers.json")
    for role in MeshRole:
        assert roles[sha256(found[f"{role}/credential"].strip())] == role
        own = {name for name in found if name.startswith(f"{role}/") and "credentials/" not in name}
        assert own == {f"{role}/credential", f"{role}/verifiers.json"}
        assert (tmp_path / role / "credential").stat().st_mode & 0o077 == 0
        assert found[f"operator/credentials/{role}"] == found[f"{role}/credential"]
    assert {name for name in found if name.startswith("queue/")} == {"queue/verifiers.json"}
    assert made(tmp_path, "--apart") == found


def test_they_lie_as_in_a_runs_directory(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert set(found) == {f"credentials/{name}" for name in [*MeshRole, "verifiers.json"]}
    assert made(tmp_path) == found


def test_a_folder_that_others_read_stays_open_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    made(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "credentials").stat().st_mode & 0o777 == 0o700


def test_a_file_of_tokens_may_have_none_yet(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.touch(0o600)
    file.write_text("tokens:\n")
    assert TokenStore(file)
