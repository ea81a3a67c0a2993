"""The GPUs, files and packages of a machine, as the check of a recipe asks; or those of `config check --assume FILE`.

Torch is loaded where transformers must make a tokenizer, and no program is started but the one that plays a recipe's
verifiers environment.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat
from typing_extensions import override

from meshrl.common import plugins
from meshrl.common.config import Config, Machine
from meshrl.common.plain_text import say
from meshrl.contract.errors import UserError
from meshrl.rollout.server_engine.checkpoint import read_header
from meshrl.sandbox.sandbox import no_bubblewrap
from meshrl.trainer.data.files import FileRow, file_rows
from meshrl.trainer.data.prompts import PromptTokenizer
from meshrl.trainer.data.reasoning_gym import PACKAGE, ReasoningGymConfig, check

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96
GIB = 1 << 30
NO_GPU = "no GPU"
LFS = b"version https://git-lfs"
"""The beginning of what git has of a large file that was not fetched."""
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""PCI's numbers of the maker, and of the classes of its GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device."""

    id: str
    """The device's name for CUDA_VISIBLE_DEVICES."""
    name: str = ""
    memory: int = 0
    """In bytes; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpus:
    """One machine."""

    name: str
    gpus: tuple[Gpu, ...]
    bus_order: bool = True
    """The ids count by place on the bus; False: they are those of the user's CUDA_VISIBLE_DEVICES."""


class _DeviceMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpus_of(environment: Mapping[str, str], library: Any | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would see with this environment.

    Args:
        environment: Its CUDA_VISIBLE_DEVICES is obeyed: numbers, or beginnings of UUIDs. As CUDA does, what stands
            behind an unknown one does not count.
        library: NVIDIA's management library (NVML), loaded; None where there is none.
    """
    present = _present(library)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpu for gpu, _ in present)
    found: list[Gpu] = []
    for word in filter(None, map(str.strip, visible.split(","))):
        if word.isdigit():
            match = next((gpu for gpu, _ in present if gpu.id == word), None)
        else:
            # A slice of a GPU (MIG) has a UUID of its own, whose memory is not asked for.
            slice_of_one = Gpu(id=word) if word.startswith("MIG-") and present else None
            match = next((g for g, uuid in present if uuid.startswith(word)), slice_of_one)
        if match is None:
            break
        found.append(Gpu(id=word, name=match.name, memory=match.memory))
    return tuple(found)


def _present(library: Any | None) -> list[tuple[Gpu, str]]:
    """Every GPU of the machine with its UUID, by place on the bus."""
    if library is not None and library.nvmlInit_v2() == 0:
        try:
            count = ctypes.c_uint()
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
            return [_asked(library, index) for index in range(count.value)]
        finally:
            library.nvmlShutdown()
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    return [(Gpu(id=str(index)), "") for index in range(len(nodes))]


def _asked(library: Any, index: int) -> tuple[Gpu, str]:
    device, memory = ctypes.c_void_p(), _DeviceMemory()
    name, uuid = (ctypes.create_string_buffer(NAME_BYTES) for _ in range(2))
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
        library.nvmlDeviceGetName(device, name, NAME_BYTES)
        library.nvmlDeviceGetUUID(device, uuid, NAME_BYTES)
        library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    shown = name.value.decode(errors="replace")
    return Gpu(id=str(index), name=shown, memory=memory.total), uuid.value.decode()


def on_the_bus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """How many GPUs of NVIDIA the kernel has found, with a driver or without one."""
    found = 0
    for device in devices.glob("*"):
        try:
            maker, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += maker == _NVIDIA and kind.startswith(_DISPLAYS)
    return found


def this_machines_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA would see in this process."""
    return _gpus_with(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _gpus_with(visible: str | None) -> tuple[Gpu, ...]:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        library = None
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return gpus_of(environment, library)


@functools.lru_cache(maxsize=1)
def _tokenizer(directory: Path, cwd: Path, changed_ns: int) -> PromptTokenizer:
    """The tokenizer in a directory, seen from `cwd`, for the checks and the warnings. Raises UserError."""
    # Imported here: the packages that read tokenizers come with the trainer's.
    from meshrl.trainer.data.prompt_tokenizer import load_prompt_tokenizer

    return load_prompt_tokenizer(directory)


class ThisMachine(Machine):
    """The machine of this process."""

    elsewhere = False
    """Whether it is assumed: only the given facts are known, and files that a recipe names exist."""

    @property
    def gpus(self) -> int:
        """The number of GPUs that CUDA would find, without asking it."""
        return len(self.devices)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """The GPUs that CUDA would see."""
        return this_machines_gpus()

    @property
    def no_gpu(self) -> str:
        """The reason why services can use no GPU."""
        found = on_the_bus() if "CUDA_VISIBLE_DEVICES" not in os.environ else 0
        return f"no driver for {found} NVIDIA GPUs on its bus" if found else NO_GPU

    @property
    def bus_order(self) -> bool:
        """Whether the devices are numbered by their place on the bus; else they are those of the user's variable."""
        return "CUDA_VISIBLE_DEVICES" not in os.environ

    def installed(self, package: str) -> bool:
        """Whether `package`, a module or a distribution of that name, can be imported."""
        return plugins.find(package.replace("-", "_")) is not None

    def told_of(self, package: str) -> bool:
        """Whether a package that the recipe does not name is installed."""
        return self.installed(package)

    def program(self, name: str) -> bool:
        """Whether `name`, a path or a word on PATH, can be run."""
        return shutil.which(name) is not None

    def tried(self, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> str:
        """The last line of a program that refuses its work; empty where it does it."""
        say(f"this runs {command[0]}, which loads what the recipe names", err=True)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                env={**os.environ, **env},
            )
        except subprocess.TimeoutExpired:
            return f"{command[0]} has not answered within {timeout_s:g} s"
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        said = done.stderr.decode(errors="replace").strip().splitlines() or [
            f"it ended with {done.returncode}"
        ]
        return said[-1] if done.returncode else ""

    def exists(self, path: Path) -> bool:
        """Whether there is a file or directory."""
        return path.exists()

    def is_file(self, path: Path) -> bool:
        """Whether there is a file."""
        return path.is_file()

    def names(self, directory: Path) -> list[str]:
        """Entries of a directory; none where there is no such directory."""
        return [entry.name for entry in directory.iterdir()] if directory.is_dir() else []

    def text(self, path: Path) -> str:
        """The text of a file. Raises UserError."""
        try:
            return path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UserError(f"{path} cannot be read: {reason}") from error

    def json(self, path: Path) -> Mapping[str, Any]:
        """The object in a file; empty where there is none."""
        try:
            value = json.loads(self.text(path))
        except (UserError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def vocabulary(self, directory: Path) -> Mapping[str, int]:
        """Token to id, as tokenizer.json has them; empty where there is none of a known form."""
        content = self.json(directory / "tokenizer.json")
        with suppress(KeyError, TypeError, IndexError, ValueError):
            listed = content["model"]["vocab"]
            if isinstance(listed, list):  # unigram models: pairs of token and score
                listed = {pair[0]: number for number, pair in enumerate(listed)}
            added = {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
            return {**listed, **added}
        return {}

    def rows(self, path: Path, reader: str | None) -> Iterator[FileRow]:
        """The rows of a data file. Raises UserError."""
        return file_rows([path], reader)

    def known(self, path: Path) -> bool:
        """Whether the content of a file or directory is known."""
        return True

    def tokenizer(self, directory: Path) -> PromptTokenizer | None:
        """The tokenizer in a directory, as the feeder loads it; None where it cannot be told.

        Raises:
            UserError: it is broken.
        """
        if not ThisMachine.installed(self, "transformers") or not self.names(directory):
            return None
        newest = max(entry.lstat().st_mtime_ns for entry in directory.iterdir())
        return _tokenizer(directory, Path.cwd(), newest)

    def check_gym(self, gym: ReasoningGymConfig) -> None:
        """Try the names and options of its tasks, where the package is installed. Raises ConfigError."""
        if ThisMachine.installed(self, PACKAGE):
            check(gym)

    def tensors(self, model: Path) -> Mapping[str, tuple[int, ...]] | None:
        """Shapes of the tensors of a checkpoint by their full names; None where they cannot be told."""
        index = self.json(model / "model.safetensors.index.json").get("weight_map")
        files = {*index.values()} if isinstance(index, dict) else {"model.safetensors"}
        try:
            found = [self.shapes(model / file) for file in files]
        except UserError:
            return None
        return {name: shape for shapes in found for name, shape in shapes.items()} or None

    def shapes(self, file: Path) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors of a file of weights.

        Raises:
            UserError: it is no such file, or not all of one.
        """
        try:
            header, begin = read_header(file)
            ends = [int(entry["data_offsets"][1]) for entry in header.values()]
            shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
            size = file.stat().st_size
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            with suppress(OSError), file.open("rb") as opened:
                if opened.read(len(LFS)) == LFS:
                    raise UserError(
                        f"{file} is a pointer of git-lfs; want the weights: git lfs pull"
                    ) from error
            raise UserError(f"{file}: no readable weights: {error}") from error
        if size != begin + max(ends, default=0):
            raise UserError(
                f"{file} has {size} bytes, and its header says {begin + max(ends, default=0)}: copy it again"
            )
        return shapes

    @property
    def no_sandbox(self) -> str:
        """Why functions cannot be isolated strictly; empty where they can."""
        return no_bubblewrap() or ""


class Assumptions(Config):
    """The file of `config check --assume`, which describes another machine. Other facts are those of this one."""

    gpus: NonNegativeInt | None = None
    """Number of GPUs."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of each of them, in GiB."""
    packages: dict[str, bool] = Field(default_factory=dict)
    """Python packages, and whether each is installed."""
    programs: dict[str, bool] = Field(default_factory=dict)
    """Programs, and whether each can be run."""
    models: dict[Path, dict[str, Any]] = Field(default_factory=dict)
    """Checkpoint directories, each with what its config.json says; weights and tokenizer are taken to be there."""
    rows: dict[Path, list[dict[str, Any]]] = Field(default_factory=dict)
    """Data files, each with its first rows."""
    files: dict[Path, str] = Field(default_factory=dict)
    """Other files, such as that of a reward, each with its text."""

    def lines(self) -> Iterator[str]:
        """Every assumption, one line each."""
        if self.gpus is not None:
            each = f" of {self.gpu_memory_gib:g} GiB" if self.gpu_memory_gib else ""
            yield f"{self.gpus} GPUs{each}"
        for name, there in self.packages.items():
            yield f"the package {name} is {'installed' if there else 'not installed'}"
        for name, there in self.programs.items():
            yield f"the program {name} is {'there' if there else 'not there'}"
        for path, config in self.models.items():
            kind = ", ".join(config.get("architectures") or ["unnamed"])
            yield f"{path} is a checkpoint of {kind} with weights and tokenizer"
        for path, rows in self.rows.items():
            yield f"{path} begins with {len(rows)} given rows"
        for path, text in self.files.items():
            yield f"{path} is a file of {len(text.splitlines())} given lines"


class AssumedMachine(ThisMachine):
    """Another machine: as `assumed` says, else as this one is, or, `elsewhere`, as the recipe needs it."""

    def __init__(self, assumed: Assumptions, *, elsewhere: bool = False) -> None:
        self._assumed = assumed
        self.elsewhere = elsewhere

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """The assumed GPUs, else those of this machine."""
        assumed = self._assumed
        if assumed.gpus is None:
            return () if self.elsewhere else super().devices
        memory = int((assumed.gpu_memory_gib or 0) * GIB)
        return tuple(Gpu(id=str(index), memory=memory) for index in range(assumed.gpus))

    @property
    @override
    def no_gpu(self) -> str:
        if self.elsewhere:
            return f"{NO_GPU}: say how many the nodes have (--gpus-per-node)"
        return super().no_gpu if self._assumed.gpus is None else NO_GPU

    @property
    def bus_order(self) -> bool:
        """Whether the devices are numbered by the bus: always for assumed GPUs, else as on this machine."""
        return self._assumed.gpus is not None or super().bus_order

    def installed(self, package: str) -> bool:
        """Whether a package is installed: as assumed, else true on another machine, else as here."""
        given = self._assumed.packages.get(package)
        return self.elsewhere or super().installed(package) if given is None else given

    def told_of(self, package: str) -> bool:
        """Whether a package is known to be installed: as assumed, else by this machine."""
        given = self._assumed.packages.get(package)
        return not self.elsewhere and super().installed(package) if given is None else given

    def program(self, name: str) -> bool:
        """Whether a program exists: as assumed, else true on another machine, else as here."""
        given = self._assumed.programs.get(name)
        return self.elsewhere or super().program(name) if given is None else given

    def tried(self, command: Sequence[str], env: Mapping[str, str], timeout_s: float) -> str:
        """The output of a program here; empty for an assumed one."""
        assumed = self.elsewhere or command[0] in self._assumed.programs
        return "" if assumed else super().tried(command, env, timeout_s)

    @property
    def no_sandbox(self) -> str:
        """Why there is no strict sandbox: by the assumption about `bwrap`, else by this machine."""
        given = self._assumed.programs.get("bwrap")
        if given is None:
            return "" if self.elsewhere else super().no_sandbox
        return "" if given else "there is no bwrap on PATH"

    def exists(self, path: Path) -> bool:
        """Whether a path exists: as assumed, else true on another machine, else as here."""
        named = path in self._assumed.models or self.is_file(path)
        return named or self.elsewhere or super().exists(path)

    def known(self, path: Path) -> bool:
        """Whether it is assumed, or is here, for a machine that is elsewhere."""
        assumed = self._assumed
        named = path in assumed.models or path in assumed.rows or path in assumed.files
        return named or not self.elsewhere or super().exists(path)

    def is_file(self, path: Path) -> bool:
        """Whether a path is a file: as assumed, else as here."""
        assumed = self._assumed
        if not self.known(path):  # a model's directory may have a point in its name: Qwen2.5-7B
            return path.suffix[1:].isalpha()
        return path in assumed.rows or path in assumed.files or super().is_file(path)

    def names(self, directory: Path) -> list[str]:
        """The assumed entries, and those of this machine."""
        assumed = self._assumed
        if directory in assumed.models or not self.known(directory):
            return ["config.json", "model.safetensors", "tokenizer.json"]
        given = [*assumed.models, *assumed.rows, *assumed.files]
        return [*(p.name for p in given if p.parent == directory), *super().names(directory)]

    def text(self, path: Path) -> str:
        """The text of a file: as assumed, else of the file here."""
        assumed = self._assumed
        if path.name == "config.json" and path.parent in assumed.models:
            return json.dumps(assumed.models[path.parent])
        return assumed.files[path] if path in assumed.files else super().text(path)

    def rows(self, path: Path, reader: str | None) -> Iterator[FileRow]:
        """The assumed rows, else those of the file."""
        rows = self._assumed.rows.get(path)
        if rows is None:
            return super().rows(path, reader)
        numbered = enumerate(rows, start=1)
        return (FileRow(f"{path}:{number}", row) for number, row in numbered)

    def tokenizer(self, directory: Path) -> PromptTokenizer | None:
        """The checkpoint's tokenizer; None for an assumed model."""
        told = self.known(directory) and directory not in self._assumed.models
        return super().tokenizer(directory) if told else None

    def tensors(self, model: Path) -> Mapping[str, tuple[int, ...]] | None:
        """The checkpoint's tensors; None for an assumed model."""
        return None if model in self._assumed.models else super().tensors(model)

    def shapes(self, file: Path) -> Mapping[str, tuple[int, ...]]:
        """The file's tensors; none for an assumed model."""
        return {} if file.parent in self._assumed.models else super().shapes(file)
