"""Models and data sets of the Hugging Face hub in recipes: names become paths in the local cache.

    model:  {path: Qwen/Qwen2.5-0.5B-Instruct}      hf://ORG/NAME[@REVISION]
    data:   {train_files: openai/gsm8k}             hf://datasets/ORG/NAME[@REVISION][/FOLDER, FILE or PATTERN]

huggingface_hub downloads, so HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean elsewhere. Only
weights in safetensors, tokenizers, configurations and data files are taken: nothing that holds code or pickles.
"""

from __future__ import annotations

import copy
import fnmatch
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from meshrl.common.checks import Loc
from meshrl.config.explain import origin_of
from meshrl.config.machine import ThisMachine
from meshrl.contract.errors import ConfigError, UserError
from meshrl.trainer.data.files import has_reader

log = logging.getLogger(__name__)
NO_FILE = "/"
"""A pattern of none."""
ASKING_S = 10.0
"""The hub may take so long to answer."""
MODELS: Final[tuple[Loc, ...]] = (
    ("model", "path"),
    ("model", "tokenizer_path"),
    ("reference", "path"),
    ("critic", "path"),
    ("reference_path",),
)
"""Keys of recipes, of RL and of offline training, that name a model."""
TRAIN = ("train", "training")
HELD_OUT = ("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
DATA: Final[Mapping[Loc, Sequence[str]]] = {
    ("data", "train_files"): TRAIN,
    ("data", "val_files"): HELD_OUT,
    ("train_files",): TRAIN,
    ("val_files",): HELD_OUT,
}
"""Keys that name data files, and words in the names of such files; the first word that a data set has is taken."""
OTHERS: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files of a model beside its weights: configurations and tokenizers."""
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
URI = re.compile(
    r"hf://(?P<kind>datasets/)?(?P<name>[\w.-]+/[\w.-]+?)(@(?P<revision>[^/\s]+))?(/(?P<inside>.+))?"
)
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\b")


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository that a recipe names."""

    name: str
    """`ORG/NAME`"""
    dataset: bool
    revision: str | None = None
    inside: str = ""
    """A folder, a file or a pattern of files."""

    @property
    def kind(self) -> str:
        """The hub's name of its kind."""
        return "dataset" if self.dataset else "model"

    @property
    def command(self) -> str:
        """The command that downloads it."""
        kind = " --repo-type dataset" if self.dataset else ""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.name}{kind}{revision}"


def upload(folder: Path, name: str, message: str) -> None:
    """Commit a folder to a model of the hub, with the token that HF_TOKEN or `hf auth login` gives.

    Raises:
        UserError: the hub cannot be reached, or refuses it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=name, commit_message=message)
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{name}: not uploaded, {folder} is complete: {reason}") from error


def with_local_paths(
    tree: Mapping[str, Any],
    origins: Mapping[Loc, str],
    machine: ThisMachine,
    sections: Collection[str] | None = None,
) -> dict[str, Any]:
    """A recipe's tree with the local files of everything that it takes from the hub.

    Args:
        tree: The recipe.
        origins: The place of each key.
        machine: What is a path there is no name.
        sections: Only what these name; None: all of it.

    Raises:
        ConfigError: one line for each that cannot be had.
    """
    made, wrong = copy.deepcopy(dict(tree)), list[str]()
    for at, words in (*((at, ()) for at in MODELS), *DATA.items()):
        *above, last = at
        if sections is not None and at[0] not in sections:
            continue
        holder: Any = made
        for key in above:
            holder = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or last not in holder:
            continue
        try:
            if words:
                holder[last] = _data(holder[last], words, machine)
            elif repository := repository_of(holder[last], False, machine):
                holder[last] = str(_model(repository, weights=last != "tokenizer_path"))
        except UserError as error:
            wrong.append(f"{origin_of(dict(origins), at)}: {'.'.join(map(str, at))}: {error}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return made


def _data(value: Any, words: Sequence[str], machine: ThisMachine) -> Any:
    """A key's value with local paths of the split that `words` name. Raises UserError."""
    found: list[Any] = []
    for one in value if isinstance(value, list) else [value]:
        repository = repository_of(one, True, machine)
        found += [one] if repository is None else map(str, _files(repository, words))
    return found


def repository_of(value: Any, dataset: bool, machine: ThisMachine) -> Repository | None:
    """The repository that a value names; None for a local path. Raises UserError for a name that is none."""
    if not isinstance(value, str):
        return None
    if value.startswith("hf://"):
        found = URI.fullmatch(value)
        if found is None or bool(found["kind"]) > dataset or (found["inside"] and not dataset):
            want = (
                "hf://datasets/ORG/NAME[@REVISION][/FOLDER]"
                if dataset
                else "hf://ORG/NAME[@REVISION]"
            )
            raise UserError(f"{value}: want {want}")
        return Repository(found["name"], dataset, found["revision"], found["inside"] or "")
    path = Path(value)
    local = machine.exists(path) or machine.exists(path.parent) or has_reader(path, None)
    return None if local or not NAME.fullmatch(value) else Repository(value, dataset)


def _model(repository: Repository, *, weights: bool) -> Path:
    """The folder with a model's files, or with those of its tokenizer alone."""
    names = [name for name in _names(repository) if "/" not in name]
    shards = [n for n in names if n.endswith(".safetensors") and not n.startswith("consolidated")]
    if weights and not shards:
        raise UserError(
            f"{repository.name} has no weights in safetensors; other files of weights may hold code"
        )
    _complete(shards, repository)
    others = [name for name in names if any(fnmatch.fnmatchcase(name, one) for one in OTHERS)]
    return _snapshot(repository, [*others, *shards] if weights else others)


def _files(repository: Repository, words: Sequence[str]) -> list[Path]:
    """The data files of one split, in order."""
    names = [name for name in _names(repository) if has_reader(Path(name), None)]
    inside = repository.inside.rstrip("/")
    chosen = [name for name in names if fnmatch.fnmatchcase(name, inside)]
    if not chosen:
        under = [name for name in names if not inside or name.startswith(f"{inside}/")]
        split = next((word for word in words if any(_has(name, word) for name in under)), None)
        chosen = [name for name in under if split and _has(name, split)]
        folders = sorted({str(PurePosixPath(name).parent) for name in chosen})
        if len(folders) > 1:
            raise UserError(
                f"{repository.name} has {words[0]} files in {', '.join(folders)}; name one of them:"
                f" hf://datasets/{repository.name}/{folders[0]}"
            )
    if not chosen:
        known = ", ".join(names[:8]) or "none"
        raise UserError(
            f"{repository.name} has no data files for {words[0]}{f' in {inside}' if inside else ''}; name them:"
            f" hf://datasets/{repository.name}/FILE (it has {known})"
        )
    _complete(chosen, repository)
    folder = _snapshot(repository, chosen)
    return [folder / name for name in sorted(chosen)]


def _has(name: str, word: str) -> bool:
    """Whether a file's name, or its folder's, has the word by itself."""
    path = PurePosixPath(name)
    return word in re.split(r"[^a-z0-9]+", f"{path.parent.name}/{path.stem}".lower())


def _complete(names: Sequence[str], repository: Repository) -> None:
    """Raises UserError where a part of `…-00000-of-00002` is not there: it was not downloaded wholly."""
    for whole in {found[2] for name in names if (found := SHARD.search(name))}:
        parts = {found[1] for name in names if (found := SHARD.search(name)) and found[2] == whole}
        if len(parts) < int(whole):
            raise UserError(
                f"{repository.name}: {len(parts)} of {int(whole)} parts are in the cache; get the rest:"
                f" {repository.command}"
            )


def _names(repository: Repository) -> list[str]:
    """Names of all files of a repository; of those in the cache where the hub cannot be reached."""
    hub = _hub()
    kind, revision = repository.kind, repository.revision
    try:
        found = hub.HfApi().repo_info(
            repository.name, repo_type=kind, revision=revision, timeout=ASKING_S
        )
        return [file.rfilename for file in found.siblings or ()]
    except hub.errors.HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise _refused(repository, error) from error
    except (
        Exception
    ) as error:  # offline, by switch or by fault; whose exceptions it is depends on the version
        log.debug("%s: %s", repository.name, error)
    folder = _snapshot(repository, [NO_FILE], cached=True)
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _snapshot(repository: Repository, patterns: Sequence[str], *, cached: bool = False) -> Path:
    """The folder of a revision with its files of these names, downloaded; with `cached` as it is in the cache."""
    hub = _hub()
    try:
        folder = Path(
            hub.snapshot_download(
                repository.name,
                repo_type=repository.kind,
                revision=repository.revision,
                allow_patterns=list(patterns),
                etag_timeout=ASKING_S,
                local_files_only=cached,
            )
        )
    except hub.errors.HfHubHTTPError as error:
        raise _refused(repository, error) from error
    except hub.errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{repository.name} is not in the cache, or not all of it, and the Hugging Face hub cannot be reached:"
            f" where it can be, run {repository.command} and bring HF_HOME here, or name local files"
        ) from error
    if repository.revision != folder.name and not cached:
        kind = "datasets/" if repository.dataset else ""
        log.warning("%s is hf://%s%s@%s", repository.name, kind, repository.name, folder.name)
    return folder


def _refused(repository: Repository, error: Any) -> UserError:
    """The meaning of the hub's answer."""
    what = "data set" if repository.dataset else "model"
    status = error.response.status_code
    if "Gated" in type(error).__name__ or status == 403:
        why = "wants a token of an account that may read it (hf auth login, or HF_TOKEN)"
    elif "Revision" in type(error).__name__:
        why = f"has no revision {repository.revision}"
    elif status in (401, 404):
        why = "is not on the hub, or is private and wants a token (hf auth login, or HF_TOKEN)"
    else:
        why = f"cannot be had: the hub answers {status}"
    return UserError(f"the {what} {repository.name} {why}; no such path is here either")


def _hub() -> Any:
    """huggingface_hub, which comes with transformers. Raises UserError."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise UserError(
            "names of the hub need huggingface_hub: pip install huggingface_hub"
        ) from error
    return huggingface_hub
