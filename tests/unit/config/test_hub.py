"""Names of the Hugging Face hub in recipes, against a hub on loopback: downloads, revisions, cache, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from meshrl.config import hub as on_hub
from meshrl.config import load_recipe
from meshrl.config.recipe import Recipe
from meshrl.contract.errors import ConfigError, UserError
from tests.doubles.hub import FakeHub, serving

GSM8K, QWEN = "datasets/openai/gsm8k", "models/Qwen/tiny"
ROW = b'{"prompt": "1+1?", "answer": "2"}\n'
MODEL = {
    "config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights",
    "modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"x",
}  # fmt: skip
DATA = {
    "README.md": b"",
    "main/train-00000-of-00002.jsonl": ROW,
    "main/train-00001-of-00002.jsonl": ROW,
    "main/test.jsonl": ROW,
    "loader.py": b"raise SystemExit",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a model and a data set; what is downloaded goes into a cache of the test's own."""
    with serving(FakeHub()) as served:
        served.push(GSM8K, DATA)
        served.push(QWEN, MODEL)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.chdir(tmp_path)
        yield served


def load(*overrides: str) -> Recipe:
    Path("my.yaml").write_text("model: {path: Qwen/tiny}\ndata: {train_files: openai/gsm8k}\n")
    return load_recipe(Path("my.yaml"), overrides, check=False)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (line,) = str(caught.value).splitlines()
    return line


def test_names_become_the_files_of_a_snapshot(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load("data.val_files=[openai/gsm8k, own.jsonl]")
    folder = recipe.data.train_files[0].parent
    assert [path.name for path in recipe.data.train_files] == [
        "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"
    ]  # fmt: skip
    assert recipe.data.val_files == [folder / "test.jsonl", Path("own.jsonl")]
    assert recipe.data.train_files[0].read_bytes() == ROW
    assert sorted(path.name for path in recipe.model.path.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    commit = next(iter(hub.revisions[GSM8K]))
    assert f"openai/gsm8k is hf://datasets/openai/gsm8k@{commit}" in caplog.text
    # No code and no pickle: neither of them was even asked for.
    assert not {"loader.py", "modeling.py", "pytorch_model.bin"} & set(hub.downloaded())


def test_a_revision_is_pinned_and_a_second_load_downloads_nothing(hub: FakeHub) -> None:
    first = next(iter(hub.revisions[GSM8K]))
    hub.push(GSM8K, {"train.csv": b"prompt,answer\n1+1?,2\n"})
    assert [path.name for path in load().data.train_files] == ["train.csv"]
    pinned = f"data.train_files=hf://datasets/openai/gsm8k@{first}/main/train*"
    assert len(load(pinned).data.train_files) == 2
    hub.asked.clear()
    assert len(load(pinned).data.train_files) == 2 and not hub.asked


def test_offline_the_cache_counts(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load().data.train_files == before.data.train_files
    assert load().model.path == before.model.path
    said = refused("data.val_files=openai/gsm8k")  # its file was never downloaded
    assert "data.val_files: openai/gsm8k has no data files for test" in said
    before.data.train_files[1].unlink()
    assert "1 of 2 parts are in the cache; get the rest: hf download openai/gsm8k" in refused()


def test_where_no_hub_can_be_reached_the_command_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    said = refused("model.path=model", "data.train_files=hf://datasets/openai/gsm8k@v1/main")
    assert said == (
        "command line: data.train_files=hf://datasets/openai/gsm8k@v1/main: data.train_files: openai/gsm8k is not in"
        " the cache, or not all of it, and the Hugging Face hub cannot be reached: where it can be, run hf download"
        " openai/gsm8k --repo-type dataset --revision v1 and bring HF_HOME here, or name local files"
    )
    assert "my.yaml:1: model.path: Qwen/tiny is not in the cache" in refused(
        "data.train_files=a.jsonl"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.path=Qwen/none", "the model Qwen/none is not on the hub, or is private"),
        ("model.path=hf://Qwen/tiny@v9", "the model Qwen/tiny has no revision v9"),
        ("model.path=gated/model", "gated/model wants a token of an account that may read it"),
        ("model.path=pickled/model", "pickled/model has no weights in safetensors"),
        ("model.path=hf://datasets/a/b", "want hf://ORG/NAME[@REVISION]"),
        ("data.train_files=hf://gsm8k", "want hf://datasets/ORG/NAME"),
        ("data.train_files=two/configs", "has train files in main, socratic; name one of them:"),
        ("data.train_files=scripts/only", "scripts/only has no data files for train; name them:"),
        (
            "data.train_files=hf://datasets/openai/gsm8k/x",
            "no data files for train in x; name them",
        ),
    ],
)
def test_what_cannot_be_had_is_one_line(hub: FakeHub, override: str, said: str) -> None:
    hub.push("models/gated/model", MODEL)
    hub.gated.add("models/gated/model")
    hub.push("models/pickled/model", {"pytorch_model.bin": b""})
    hub.push("datasets/two/configs", {"main/train.jsonl": ROW, "socratic/train.jsonl": ROW})
    hub.push("datasets/scripts/only", {"load.py": b""})
    assert said in refused(override)


def test_local_paths_are_no_names(hub: FakeHub) -> None:
    Path("data").mkdir()
    recipe = load(
        "model.path=data/model", "data.train_files=data/train", "data.val_files=a/b.jsonl"
    )
    assert recipe.model.path == Path("data/model") and not hub.asked
    assert recipe.data.train_files == [Path("data/train")]


def test_the_environment_says_where_hub_and_cache_are(hub: FakeHub, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    Path("my.yaml").write_text("model: {path: Qwen/tiny}\ndata: {train_files: openai/gsm8k}\n")
    code = (
        "from pathlib import Path; from meshrl.config import load_recipe;"
        "print(load_recipe(Path('my.yaml'), check=False).model_dump_json())"
    )
    for offline in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**environment, "HF_HUB_OFFLINE": offline},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout)
        assert found["model"]["path"].startswith(str(tmp_path / "home" / "hub"))
        assert len(found["data"]["train_files"]) == 2


def test_an_export_is_uploaded_to_a_private_model(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder = tmp_path / "export"
    folder.mkdir()
    files = {"config.json": b"{}", "model.safetensors": bytes(range(200))}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    on_hub.upload(folder, "me/tuned", "demo, step 8")
    (commit,) = hub.revisions["models/me/tuned"].values()
    assert commit == files and hub.visibility == {"me/tuned": "private"}
    hub.gated.add("models/you/theirs")
    with pytest.raises(
        UserError, match=r"you/theirs: not uploaded, .* is complete: .*403"
    ) as caught:
        on_hub.upload(folder, "you/theirs", "")
    assert "\n" not in str(caught.value) and "hf_secret" not in str(caught.value)
