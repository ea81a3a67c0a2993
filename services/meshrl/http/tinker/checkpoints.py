"""Files of callers' models as the SDK asks for them: forms of models, checkpoints by their paths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock

from meshrl.common.files import replace_file
from meshrl.contract.errors import NotFoundError, UserError
from meshrl.contract.types import CreateModel, Json
from meshrl.trainer.hosted import MODELS
from meshrl.trainer.hosted.storage import (
    FACTS,
    SAMPLER,
    WEIGHTS,
    check_name,
    copy_folder,
    facts_of,
    folder_of,
    path_of,
    stored,
)

KINDS = {WEIGHTS: "training", SAMPLER: "sampler"}
UNNAMED = "unnamed-"
"""Names of weights that a client wants a sampler of and no path: no other client can ask for them."""
REMOVING = ".removing-"
MOST_UNNAMED = 4
"""Kept of each model, because a loop may sample from the last ones while it trains on."""


class HostedCheckpoints:
    """The folder of the training host, and beside it the forms of models. Used by threads: all of it may block."""

    def __init__(self, root: Path, base: Path, base_name: str) -> None:
        """Remove what a kill left half removed."""
        self._root, self._base, self._base_name = root, base, base_name
        self._changes = Lock()
        for doomed in root.glob(f"checkpoints/*/*/{REMOVING}*"):
            shutil.rmtree(doomed)

    def remember(self, model: str, verb: CreateModel) -> None:
        """Keep the form of a model that is made now. Raises NotFoundError."""
        form: dict[str, Json] = asdict(verb)
        if verb.load_from is not None:
            form |= self._facts(verb.load_from)
        folder = self._root / "forms"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(folder / f"{check_name('model', model)}.json", json.dumps(form))

    def form(self, model: str) -> Mapping[str, Json]:
        """The settings with which a model was made. Raises NotFoundError."""
        path = self._root / "forms" / f"{check_name('model', model)}.json"
        try:
            form: dict[str, Json] = json.loads(path.read_text())
        except OSError as error:
            raise NotFoundError(f"there is no model {model}") from error
        return form

    def models(self) -> list[str]:
        """All models that were asked for, the newest first."""
        forms = [(path.stat().st_mtime_ns, path.stem) for path in self._root.glob("forms/*.json")]
        return [model for _, model in sorted(forms, reverse=True)]

    def run(self, model: str) -> dict[str, Json]:
        """A model as the SDK lists it. Raises NotFoundError."""
        rank, newest = self.form(model)["lora_rank"], {each: None for each in KINDS.values()}
        newest |= {each["checkpoint_type"]: each for each in self.of(model)}
        files = [
            self._root / "forms" / f"{model}.json",
            *(self._root / MODELS / model).glob("journal-*"),
        ]
        last = max(path.stat().st_mtime for path in files)
        return {
            "training_run_id": model,
            "base_model": self._base_name,
            "model_owner": "tuner",
            "is_lora": rank is not None,
            "lora_rank": rank,
            "last_request_time": datetime.fromtimestamp(last, UTC).isoformat(),
            "last_checkpoint": newest[KINDS[WEIGHTS]],
            "last_sampler_checkpoint": newest[KINDS[SAMPLER]],
        }

    def sampler(self, path: str) -> Path:
        """The directory that an engine serves; the base model's for an empty path.

        Raises:
            NotFoundError: there is no such checkpoint.
            UserError: it is none for samplers.
        """
        if not path:
            return self._base
        folder = stored(self._root, path)
        if folder.parent.name != SAMPLER:
            raise UserError(f"{path}: want weights of save_weights_for_sampler")
        return folder

    def info(self, path: str) -> Mapping[str, Json]:
        """The form of a checkpoint, which its loader needs."""
        form = self._facts(path)
        rank = form.get("lora_rank")
        return {
            "base_model": self._base_name,
            "is_lora": rank is not None,
            "lora_rank": rank,
            "train_unembed": form.get("lora_unembedding"),
            "train_mlp": form.get("lora_mlp"),
            "train_attn": form.get("lora_attention"),
        }

    def all(self) -> list[Json]:
        """All checkpoints of all models, each model's oldest first."""
        folder = self._root / "checkpoints"
        models = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        return [found for model in models for found in self.of(model)]

    def of(self, model: str) -> list[dict[str, Json]]:
        """All checkpoints of a model, the oldest first."""
        check_name("model", model)
        found: list[dict[str, Json]] = []
        for kind, called in KINDS.items():
            folder = self._root / "checkpoints" / model / kind
            for each in sorted(folder.iterdir()) if folder.is_dir() else ():
                if each.name.startswith((UNNAMED, ".")):
                    continue
                # One without the file is no checkpoint, or is being removed.
                with suppress(FileNotFoundError):
                    made = datetime.fromtimestamp((each / FACTS).stat().st_mtime, UTC)
                    sizes = [file.stat().st_size for file in each.rglob("*") if file.is_file()]
                    found.append(
                        {
                            "checkpoint_id": f"{kind}/{each.name}",
                            "checkpoint_type": called,
                            "time": made.isoformat(),
                            "tinker_path": path_of(model, kind, each.name),
                            "size_bytes": sum(sizes),
                        }
                    )
        return [*sorted(found, key=lambda each: str(each["time"]))]

    def forget_unnamed(self, model: str) -> None:
        """Remove all but the newest weights of a model that were saved without a name."""
        folder = self._root / "checkpoints" / check_name("model", model) / SAMPLER
        found = sorted(
            folder.glob(f"{UNNAMED}*"), key=lambda each: int(each.name.rpartition("-")[2])
        )
        for each in found[:-MOST_UNNAMED]:
            self.remove(path_of(model, SAMPLER, each.name))

    def copy(self, source: str, model: str) -> str:
        """Copy a checkpoint to the same name of another model, once; return its path.

        Raises:
            NotFoundError: there is no such checkpoint.
            UserError: the other model has another one of this name.
        """
        folder = stored(self._root, source)
        path = path_of(check_name("model", model), folder.parent.name, folder.name)
        target = folder_of(self._root, path)
        with self._changes:
            if not target.exists():
                copy_folder(folder, target)
            elif facts_of(target, verify=False) != facts_of(folder, verify=False):
                raise UserError(f"there is {path} already")
        return path

    def remove(self, path: str) -> None:
        """Remove a checkpoint. Raises NotFoundError, UserError."""
        with self._changes:
            folder = stored(self._root, path)
            doomed = folder.with_name(f"{REMOVING}{folder.name}")
            folder.rename(doomed)
            shutil.rmtree(doomed)

    def _facts(self, path: str) -> dict[str, Json]:
        folder_of(self._root, path)
        facts = facts_of(stored(self._root, path), verify=False)
        form = facts.get("form", facts)
        return dict(form) if isinstance(form, dict) else {}
