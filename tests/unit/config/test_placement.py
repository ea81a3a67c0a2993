"""Which GPUs each service gets, on machines that are only described."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.cli.commands.serve import take_share
from meshrl.common.device_lease import DeviceShare, chosen_device
from meshrl.config import Recipe, load_recipe
from meshrl.config.machine import GIB, AssumedMachine, Assumptions, ThisMachine, gpus_of, on_the_bus
from meshrl.config.memory import ModelShape
from meshrl.config.placement import Placement, place
from meshrl.contract.errors import CapacityError, ConfigError, UserError
from meshrl.rollout.engines import sglang, vllm

from ...pairs import fits, pairs

QWEN_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
QWEN_32B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "vocab_size": 152064,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
SMALL = """
model: {path: small}
data: {train_files: [train.jsonl]}
reward: {functions: [{name: exact_match}]}
"""
HALF = ("model.param_dtype=bfloat16", "model.enable_gradient_checkpointing=true")
WITH_REFERENCE = "actor.use_kl_loss=true"
TURNS = "placement.colocate=time_sliced"


def machine(gpus: int, memory: float | None = 80) -> AssumedMachine:
    assumed: dict[str, Any] = {
        "gpus": gpus,
        "gpu_memory_gib": memory,
        "packages": {"vllm": True, "cupy": True},
        "models": {"small": QWEN_05B, "large": QWEN_32B},
        "rows": {"train.jsonl": [{"prompt": "1+1?", "answer": "2"}]},
    }
    return AssumedMachine(Assumptions.model_validate(assumed))


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "my.yaml"
    path.write_text("model: {path: small}\n")
    return load_recipe(path, overrides, check=False)


def devices(placement: Placement) -> dict[str, str]:
    """Service to host (where there are several) and devices."""
    several = len(placement.hosts) > 1
    return {
        name: (f"{at.host.name}:" if several else "") + ",".join(at.share.devices)
        for name, at in placement.places.items()
    }


def test_without_gpus_nothing_is_placed_and_the_recipe_stays_as_it_is(tmp_path: Path) -> None:
    asked = recipe(tmp_path, WITH_REFERENCE)
    placement = place(asked, machine(0))
    assert (placement.recipe, dict(placement.places), list(placement.lines())) == (asked, {}, [])


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_carrier_that_auto_takes_is_said_when_a_recipe_is_checked(
    tmp_path: Path, gpus: int
) -> None:
    for more, last in (((), "gloo"), (("weights.directory=s3://bucket/w",), "disk")):
        asked = recipe(tmp_path, "weights.carrier=auto", *more)
        said, *_ = place(asked, machine(gpus)).lines()
        assert said.startswith("weights.carrier auto: shm to workers on the trainer's machine;")
        assert said.endswith(f"nccl where both have a GPU and cupy, else {last}")
    fixed = place(recipe(tmp_path, "weights.carrier=shm"), machine(gpus)).lines()
    assert not [line for line in fixed if line.startswith("weights.carrier")]


@pytest.mark.parametrize(
    ("gpus", "overrides", "wanted"),
    [
        (1, (), {"trainer": "0", "rollout-0": "0"}),
        (1, (WITH_REFERENCE,), {"trainer": "0", "reference": "0", "rollout-0": "0"}),
        (2, (), {"trainer": "0", "rollout-0": "1"}),
        (2, (WITH_REFERENCE,), {"trainer": "0", "reference": "0", "rollout-0": "1"}),
        (
            8, (WITH_REFERENCE,),
            {"trainer": "0,1,2,3", "reference": "4", "rollout-0": "5", "rollout-1": "6"}
            | {"rollout-2": "7"},
        ),
        (
            8, (WITH_REFERENCE, "reference.nproc=2", "trainer.nproc=2"),
            {"trainer": "0,1", "reference": "2,3", **{f"rollout-{i}": f"{4 + i}" for i in range(4)}},
        ),
        (8, ("rollout.workers=1",), {"trainer": "0,1,2,3", "rollout-0": "4"}),
        (8, ("rollout.workers=6",), {"trainer": "0,1", **{f"rollout-{i}": f"{2 + i}" for i in range(6)}}),
        (8, ("trainer.nproc=6",), {"trainer": "0,1,2,3,4,5", "rollout-0": "6", "rollout-1": "7"}),
        (
            8, ("rollout.name=vllm", "placement.rollout=4", "placement.trainer=2"),
            {"trainer": "0,1", "rollout-0": "2,3,4,5"},
        ),
        (
            8, ("rollout.name=vllm", "model.path=large", *HALF),
            {"trainer": "0,1,2,3,4,5,6", "rollout-0": "7"},
        ),
        (1, ("rollout.workers=2",), {"trainer": "0", "rollout-0": "0", "rollout-1": "0"}),
        (2, ("placement.colocate=true",), {"trainer": "0,1", "rollout-0": "0", "rollout-1": "1"}),
        (2, ("trainer.device=cpu",), {"trainer": "", "rollout-0": "0", "rollout-1": "1"}),
        (2, ("rollout.engine.device=cpu",), {"trainer": "0,1"}),
        (2, ("rollout={name: vllm, engine: {url: 'http://a'}}",), {"trainer": "0,1"}),
    ],
)  # fmt: skip
def test_what_the_machine_has_is_divided(
    tmp_path: Path, gpus: int, overrides: tuple[str, ...], wanted: dict[str, str]
) -> None:
    assert devices(place(recipe(tmp_path, *overrides), machine(gpus))) == wanted


def test_of_two_machines_the_trainer_has_the_first_and_the_workers_the_second(
    tmp_path: Path,
) -> None:
    two = "placement.machines={a: 8, b: 8}"
    placement = place(recipe(tmp_path, two), machine(8))
    workers = {f"rollout-{index}": f"b:{index}" for index in range(8)}
    assert devices(placement) == {"trainer": "a:0,1,2,3,4,5,6,7", **workers}
    assert (placement.recipe.trainer.nproc, placement.recipe.rollout.workers) == (8, 8)
    placement = place(recipe(tmp_path, two, "placement.trainer=4"), machine(8))
    assert devices(placement)["rollout-3"] == "a:7"
    assert devices(placement)["rollout-11"] == "b:7"


def test_services_that_share_a_gpu_share_its_memory_and_no_port(tmp_path: Path) -> None:
    placement = place(recipe(tmp_path, *HALF, WITH_REFERENCE), machine(1))
    shares = [at.share for at in placement.places.values()]
    assert sum(share.memory for share in shares) <= 0.96
    assert min(share.memory for share in shares) > 0.02
    ports = [port for share in shares for port in share.ports]
    assert len(set(ports)) == len(ports)
    unknown = place(recipe(tmp_path, WITH_REFERENCE), machine(1, memory=None))
    assert [at.share.memory for at in unknown.places.values()] == [0.45, 0.1, 0.4]
    unknown = place(recipe(tmp_path, "rollout.workers=2"), machine(1, memory=None))
    assert [at.share.memory for at in unknown.places.values()] == [0.45, 0.2, 0.2]


def test_in_turns_each_has_what_the_other_does_not_keep(tmp_path: Path) -> None:
    asked = recipe(tmp_path, TURNS, *HALF, WITH_REFERENCE)
    shares = {n: at.share for n, at in place(asked, machine(1, 24)).places.items()}
    for name in ("trainer", "rollout-0"):
        assert 0.6 < shares[name].memory < 0.95 - shares["reference"].memory - 1.5 / 24 + 0.01
        assert shares[name].in_turns
    assert not shares["reference"].in_turns
    alone = place(recipe(tmp_path, *HALF), machine(1, 16)).places["trainer"].need
    assert alone is not None
    small = machine(1, (alone.total / GIB + 1.6) / 0.95)
    assert list(place(recipe(tmp_path, *HALF), small).problems())  # side by side
    assert not list(place(recipe(tmp_path, TURNS, *HALF), small).problems())
    arguments = vllm.share_arguments(shares["rollout-0"])
    assert "--enable-sleep-mode" in arguments
    assert "--enable-memory-saver" in sglang.share_arguments(shares["rollout-0"])
    assert "--enable-sleep-mode" not in vllm.share_arguments(shares["reference"])
    unknown = place(recipe(tmp_path, TURNS), machine(1, memory=None))
    assert [at.share.memory for at in unknown.places.values()] == [0.85, 0.85]


def test_a_share_is_the_same_on_the_other_side_of_the_environment() -> None:
    share = DeviceShare(devices=("2", "3"), memory=0.35, ports=range(10_000, 10_064))
    assert DeviceShare.of(share.environment) == share
    assert DeviceShare.of({"CUDA_VISIBLE_DEVICES": "2"}) is None
    assert DeviceShare(devices=()).environment["CUDA_VISIBLE_DEVICES"] == ""


def test_one_more_worker_gets_what_is_free_or_is_refused(tmp_path: Path) -> None:
    placement = place(recipe(tmp_path, "rollout.workers=1"), machine(4))
    assert devices(placement) == {"trainer": "0,1", "rollout-0": "2"}
    share = placement.another("rollout-1", {"0", "1", "2"})
    assert share is not None and share.devices == ("3",)
    with pytest.raises(CapacityError, match="rollout-2 needs 1 GPU, and 0 of the 4 of"):
        placement.another("rollout-2", {"0", "1", "2", "3"})


@pytest.mark.parametrize(("asked", "line"), pairs(Path(__file__).with_name("wrong_placements.txt")))
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, asked: list[str], line: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(SMALL)
    gpus, *overrides = asked
    with pytest.raises(ConfigError) as refused:
        load_recipe(path, overrides, machine=machine(int(gpus.split()[0])))
    assert fits(str(refused.value), f"{path}: {line}")


def test_what_asks_for_no_gpu_is_placed(tmp_path: Path) -> None:
    off = "placement.trainer=0"
    for gpus, more in (
        (0, ["placement.colocate=false", TURNS]),
        (8, ["placement.reference=1", WITH_REFERENCE]),
    ):
        assert not list(place(recipe(tmp_path, off, *more), machine(gpus)).problems())


def test_memory_that_does_not_suffice_is_named_with_what_would_take_less(tmp_path: Path) -> None:
    placement = place(recipe(tmp_path, "rollout.workers=1"), machine(1, memory=24))
    (line,) = placement.problems()
    assert "GiB on a GPU of 24 GiB, by estimate: want model.param_dtype=bfloat16, or" in line
    fits = place(recipe(tmp_path, *HALF, "actor.ppo_max_token_len_per_gpu=4096"), machine(1, 24))
    assert list(fits.problems()) == []


@pytest.mark.parametrize(("config", "billions"), [(QWEN_05B, 0.494), (QWEN_32B, 32.76)])
def test_the_size_of_a_model_follows_from_its_config(
    config: Mapping[str, object], billions: float
) -> None:
    model = ModelShape.of(config)
    assert model is not None
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.002)
    assert ModelShape.of({"hidden_size": 8}) is None


class Nvml:
    """The functions of NVIDIA's management library that are called, over a list of (name, uuid, bytes)."""

    def __init__(self, *gpus: tuple[str, str, int]) -> None:
        self._gpus = gpus

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, into: Any, size: int) -> int:
        into.value = self._of(device)[0].encode()
        return 0

    def nvmlDeviceGetUUID(self, device: ctypes.c_void_p, into: Any, size: int) -> int:
        into.value = self._of(device)[1].encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, into: Any) -> int:
        into._obj.total = self._of(device)[2]
        return 0

    def _of(self, device: ctypes.c_void_p) -> tuple[str, str, int]:
        return self._gpus[(device.value or 0) - 1]


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("1,7,0", ["1"]),
        ("GPU-b,GPU-c", ["GPU-b", "GPU-c"]),
        ("MIG-1", ["MIG-1"]),
    ],
)
def test_the_driver_is_asked_for_what_cuda_would_see(visible: str | None, ids: list[str]) -> None:
    library = Nvml(*((f"H{letter}", f"GPU-{letter}", 80 * GIB) for letter in "abc"))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = gpus_of(environment, library)
    assert [gpu.id for gpu in found] == ids
    assert all(gpu.memory == 80 * GIB for gpu in found if not gpu.id.startswith("MIG"))


def test_config_check_prints_the_table_and_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(SMALL)
    assumed = {
        "gpus": 8,
        "gpu_memory_gib": 80,
        "models": {"small": QWEN_05B},
        "rows": {"train.jsonl": [{"prompt": "1+1?", "answer": "2"}]},
    }
    (tmp_path / "there.yaml").write_text(json.dumps(assumed))
    source = (
        "import sys; from meshrl.cli.root import main\n"
        "try: main()\nfinally: assert not {'torch', 'grpc'} & set(sys.modules)"
    )
    arguments = ["config", "check", "my.yaml", "--assume", "there.yaml", *HALF]
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = [
        line.split()
        for line in done.stdout.splitlines()
        if line.startswith(("trainer", "rollout-3"))
    ]
    assert [row[2:4] for row in table] == [["0,1,2,3", "100%"], ["7", "90%"]]


def test_a_service_started_by_hand_takes_the_part_that_has_its_name(tmp_path: Path) -> None:
    asked = recipe(tmp_path, f"run.dir={tmp_path / 'run'}")
    found: dict[str, str] = {}
    placed = take_share(asked, "trainer", "trainer", machine(4), found)
    assert (found["CUDA_VISIBLE_DEVICES"], placed.trainer.nproc) == ("0,1", 2)
    given = {"CUDA_VISIBLE_DEVICES": "3"}
    assert take_share(asked, "trainer", "trainer", machine(4), given) == asked
    assert given == {"CUDA_VISIBLE_DEVICES": "3"}
    assert take_share(asked, "queue", "queue", machine(4), {}).rollout.workers == 2


def test_workers_of_unknown_names_take_one_free_part_each(tmp_path: Path) -> None:
    asked = recipe(tmp_path, f"run.dir={tmp_path / 'run'}")
    given: list[dict[str, str]] = [{}, {}]
    for name, found in zip("ab", given, strict=True):
        take_share(asked, "rollout", f"rollout-{name}", machine(4), found)
    assert [found["CUDA_VISIBLE_DEVICES"] for found in given] == ["2", "3"]
    with pytest.raises(UserError, match="room for 2 rollout workers, and all of them run"):
        take_share(asked, "rollout", "rollout-c", machine(4), {})


def test_a_service_on_the_wrong_machine_is_told_where_it_belongs(tmp_path: Path) -> None:
    asked = recipe(tmp_path, "placement.machines={a: 1, b: 1}")
    with pytest.raises(UserError, match=r"trainer is placed on a, and this is .* \(.* has a, b\)"):
        take_share(asked, "trainer", "trainer", machine(1), {})


def test_engines_are_told_how_many_gpus_and_how_much_of_their_memory_they_have() -> None:
    share = DeviceShare(devices=("2", "3"), memory=0.35, ports=range(10_000, 10_064))
    assert vllm.share_arguments(share) == (
        "--tensor-parallel-size",
        "2",
        "--gpu-memory-utilization",
        "0.35",
    )
    assert sglang.share_arguments(share) == (
        "--tp-size",
        "2",
        "--mem-fraction-static",
        "0.35",
        "--nccl-port",
        "10063",
    )
    assert vllm.share_arguments(None) == sglang.share_arguments(DeviceShare(devices=())) == ()


def test_a_trainer_of_two_machines_has_as_many_gpus_on_each(tmp_path: Path) -> None:
    nodes = "trainer.nnodes=2"
    three = "placement.machines={a: 4, b: 4, c: 4}"
    placement = place(recipe(tmp_path, three, nodes, WITH_REFERENCE), machine(4))
    assert devices(placement) == {
        "trainer": "a:0,1,2",
        "trainer-1": "b:0,1,2",
        "reference": "a:3",
        "rollout-0": "b:3",
        **{f"rollout-{1 + gpu}": f"c:{gpu}" for gpu in range(4)},
    }
    assert placement.recipe.trainer.ranks == 6
    ports = {name: at.share.ports.start for name, at in placement.places.items()}
    assert ports["trainer-1"] == ports["trainer"] < ports["reference"] < ports["rollout-0"]
    placement = place(
        recipe(tmp_path, three, nodes, "model.ulysses_sequence_parallel_size=4"), machine(4)
    )
    assert devices(placement)["trainer-1"] == "b:0,1"


def test_machines_of_a_trainer_that_are_not_named_are_like_this_one(tmp_path: Path) -> None:
    placement = place(recipe(tmp_path, "trainer.nnodes=2", "trainer.nproc=4"), machine(8))
    assert placement.places["trainer-1"].share.devices == ("0", "1", "2", "3")
    with pytest.raises(
        ConfigError, match=r"trainer.nnodes: 2 machines, and placement.machines has 1"
    ):
        place(recipe(tmp_path, "trainer.nnodes=2", "placement.machines={a: 8}"), machine(8))


def test_gpus_without_a_driver_are_counted_on_the_bus(tmp_path: Path) -> None:
    for name, maker, kind in (
        ("a", "0x10de", "0x030200"),
        ("b", "0x10de", "0x030000"),
        ("its sound", "0x10de", "0x040300"),
        ("another maker's", "0x1af4", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{maker}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    (tmp_path / "gone").mkdir()
    assert on_the_bus(tmp_path) == 2
    assert on_the_bus(tmp_path / "no bus") == 0


def test_a_missing_driver_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ThisMachine, "devices", ())
    monkeypatch.setattr("meshrl.config.machine.on_the_bus", lambda: 2)
    here = ThisMachine()
    (line,) = place(recipe(tmp_path), here).lines()
    assert line == (
        "this machine has no driver for 2 NVIDIA GPUs on its bus: everything computes on the CPU"
    )
    assert not list(place(recipe(tmp_path, "trainer.device=cpu"), here).lines())
    (problem,) = place(recipe(tmp_path, "placement.trainer=2"), here).problems()
    assert problem.startswith(
        "placement.trainer: 2 GPUs, and this machine has no driver for 2 NVIDIA GPUs on its bus;"
    )


class Torch:
    """A build, and whether it sees a device."""

    def __init__(self, version: str, cuda: str | None, sees: bool) -> None:
        self.__version__ = version
        self.version = SimpleNamespace(cuda=cuda)
        self.cuda = SimpleNamespace(is_available=lambda: sees)


@pytest.mark.parametrize(
    ("asked", "given", "sees", "wanted"),
    [
        ("auto", None, False, "cpu"),
        ("auto", None, True, "cuda"),
        ("auto", ("0",), True, "cuda"),
        ("auto", (), False, "cpu"),
        ("cpu", ("0",), True, "cpu"),
        ("cpu", ("0",), False, "cpu"),
    ],
)
def test_a_service_computes_where_it_has_a_place(
    asked: str, given: tuple[str, ...] | None, sees: bool, wanted: str
) -> None:
    there = {} if given is None else DeviceShare(devices=given).environment
    torch = Torch("2.11.0", "13.0", sees)
    assert chosen_device("trainer.device", asked, torch, there) == wanted


@pytest.mark.parametrize(
    ("build", "cuda", "said"),
    [
        ("2.11.0+cpu", None, r"torch 2\.11\.0\+cpu, which has no CUDA, sees none"),
        ("2.11.0", "13.0", r"torch 2\.11\.0, which is built for CUDA 13\.0, sees none"),
    ],
)
def test_gpus_that_torch_does_not_see_are_one_line_with_both(
    build: str, cuda: str | None, said: str
) -> None:
    given = DeviceShare(devices=("0", "1")).environment
    with pytest.raises(ConfigError, match=rf"trainer.device: auto, GPU 0,1 is .*{said}") as raised:
        chosen_device("trainer.device", "auto", Torch(build, cuda, False), given)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"engine\.device: cuda, but torch sees no"):
        chosen_device("rollout.engine.device", "cuda", Torch(build, cuda, False), {})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.device=cuda", "trainer.device: cuda, 1 ranks (trainer.nproc), and"),
        ("weights.carrier=nccl", "weights.carrier: nccl moves weights between GPUs, and"),
        ("weights.carrier=cuda_ipc", "weights.carrier: cuda_ipc moves weights between GPUs, and"),
        ("rollout.engine.device=cuda", "rollout.engine.device: cuda, and"),
    ],
)
def test_what_needs_a_gpu_is_refused_on_a_machine_without_one(
    tmp_path: Path, override: str, said: str
) -> None:
    recipe(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load_recipe(tmp_path / "my.yaml", [override], machine=machine(0))
    found = [line for line in str(raised.value).splitlines() if said in line]
    assert [line.endswith("this machine has no GPU") for line in found] == [True]
