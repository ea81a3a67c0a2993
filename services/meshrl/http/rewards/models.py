"""JSON bodies of the reward registry's HTTP API; the OpenAPI document shows these classes."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from meshrl.contract.codec import printable
from meshrl.contract.errors import UserError
from meshrl.contract.types import Json, Outcome, Sample, Uid
from meshrl.rewardd.pool.signatures import FunctionKind
from meshrl.rewardd.registry.types import Case, Differences, Event, Manifest, Submission


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("text with a lone surrogate cannot be UTF-8") from error
    return value


Text = Annotated[str, AfterValidator(_text)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Same(_Model):
    """A body with the fields of a type of the registry."""

    @classmethod
    def of(cls, value: object) -> Self:
        """From the registry's type."""
        return cls.model_validate(value, from_attributes=True)


class SampleModel(_Model):
    """A judge's input."""

    solution: Text
    ground_truth: Json = None
    data_source: Text = ""
    extra_info: dict[str, Any] = Field(default_factory=dict)

    def sample(self, number: int) -> Sample:
        """As the registry's type."""
        return Sample(uid=Uid("try", "sample", number), **self.model_dump())


class CaseModel(SampleModel, _Same):
    """A sample and the score that it must get."""

    score: FiniteFloat
    tolerance: FiniteFloat = Field(default=1e-6, ge=0)

    def case(self) -> Case:
        """The case as the registry's type."""
        return Case(**self.model_dump())


class SubmitBody(_Model):
    """A submission: `source` or `wheel`."""

    name: Text
    """1 to 64 of a-z 0-9 . _ -"""
    source: Text = ""
    """A Python file."""
    wheel: str = ""
    """A pure Python wheel, in base64."""
    entry_point: Text = ""
    """A function of the file (`compute_score`); of a wheel `module:function`."""
    kind: FunctionKind = FunctionKind.COMPUTE_SCORE
    """How it is called."""
    deps: list[Text] = Field(default_factory=list)
    """Packages that it imports."""
    tests: list[CaseModel] = Field(default_factory=list)
    """Run before acceptance."""
    limits: dict[Text, FiniteFloat] = Field(default_factory=dict)
    """Lower limits than the operator's: deadline_s, memory_bytes, processes …"""
    note: Text = ""
    """For people."""
    hold: bool = False
    """True stores the version without pointing the name to it."""

    def submission(self) -> Submission:
        """The submission as the registry's type. Raises UserError if `wheel` is not base64."""
        try:
            wheel = base64.b64decode(self.wheel, validate=True)
        except (binascii.Error, ValueError) as error:
            raise UserError(f"wheel is not base64: {error}") from error
        return Submission(
            name=self.name,
            source=self.source,
            wheel=wheel,
            entry_point=self.entry_point,
            kind=self.kind,
            deps=tuple(self.deps),
            cases=tuple(case.case() for case in self.tests),
            limits=self.limits,
            note=self.note,
            point=not self.hold,
        )


class NameModel(_Same):
    """A name and its history."""

    name: str
    current: str
    """The version that it points to; empty while it points nowhere."""
    versions: list[str]
    retired: Annotated[list[str], BeforeValidator(sorted)]
    history: list[Event]


class AcceptedModel(_Model):
    """Result of a submission."""

    hash: str
    created: bool
    tests: int
    name: NameModel


class DifferenceModel(_Model):
    """One row that two versions score differently."""

    uid: str
    a: float
    b: float
    text: str
    """The end of the response, at most 200 characters."""


class DifferencesModel(_Model):
    """Version `b` against version `a`."""

    a: str
    b: str
    rows: int
    compared: int
    equal: int
    faults_a: int
    faults_b: int
    mean_a: float
    mean_b: float
    largest: list[DifferenceModel]

    @classmethod
    def of(cls, differences: Differences) -> DifferencesModel:
        """From the registry's type."""
        names = set(cls.model_fields) - {"largest"}
        largest = [
            DifferenceModel(uid=uid, a=a, b=b, text=printable(text))
            for _, uid, a, b, text in differences.largest_first
        ]
        return cls(**{name: getattr(differences, name) for name in names}, largest=largest)


class ListModel(_Same):
    """Every name, and what scores the run."""

    names: list[NameModel]
    followed: str
    scoring: str
    base: str


class VersionModel(_Model):
    """One version with what was submitted."""

    hash: str
    entry_point: str
    kind: FunctionKind
    deps: list[str]
    limits: dict[str, float]
    """The limits it asked for; the operator's apply to the others."""
    source: str
    """Empty for a wheel."""
    wheel: str
    """Base64; empty for a source."""
    tests: list[CaseModel]

    @classmethod
    def of(cls, manifest: Manifest, content: bytes, cases: tuple[Case, ...]) -> VersionModel:
        """From the registry's types."""
        packed = manifest.is_wheel
        return cls(
            hash=manifest.hash,
            entry_point=manifest.entry_point,
            kind=manifest.kind,
            deps=list(manifest.deps),
            limits=dict(manifest.limits),
            source="" if packed else content.decode(),
            wheel=base64.b64encode(content).decode() if packed else "",
            tests=[CaseModel.of(case) for case in cases],
        )


class ScoreBody(_Model):
    """Samples to try a version on."""

    samples: list[SampleModel] = Field(min_length=1, max_length=4096)
    version: Text = ""
    """Empty: the current one."""


class ScoreModel(_Same):
    """A judge's result for a sample; `score` counts unless `outcome` is a fault."""

    outcome: Outcome
    score: float
    components: dict[str, float]
    reason: str
    reward_hash: str


class CompareBody(_Model):
    """Two versions to be compared."""

    a: Text
    b: Text = ""
    """Empty: the current one."""
    samples: list[SampleModel] = Field(default_factory=list, max_length=4096)
    """Empty: the samples that the run scored last."""


class VersionBody(_Model):
    """A version, by its hash or a prefix of it."""

    version: Text = ""
