"""Every error of the mesh arrives unchanged over gRPC, and gRPC's own errors become one of them."""

from __future__ import annotations

import grpc
import pytest

from meshrl.contract import errors
from meshrl.rpc.errors import DETAIL_KEY, STATUS, from_rpc, status_of, to_detail

EVERY_ERROR = sorted(errors.BY_CODE.values(), key=lambda kind: kind.code)


def arrived(
    code: grpc.StatusCode, reason: str = "", detail: bytes | None = None
) -> errors.MeshError:
    trailing = grpc.aio.Metadata(*([(DETAIL_KEY, detail)] if detail is not None else []))
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, reason, None)
    return from_rpc(error, "queue at host:1")


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_every_error_arrives_as_its_own_class_with_its_details(
    kind: type[errors.MeshError],
) -> None:
    sent = kind("what happened", uid="r/t/0.0", size=7)
    received = arrived(status_of(sent), detail=to_detail(sent))
    assert type(received) is kind
    assert (received.message, received.details) == (
        "what happened",
        {"uid": "r/t/0.0", "size": "7"},
    )


def test_two_errors_that_call_for_different_answers_have_different_statuses() -> None:
    # Both say that it is too much; whoever has the error's detail knows whether to try again.
    assert STATUS[errors.BusyError] is STATUS[errors.CapacityError]
    others = STATUS.keys() - {errors.BusyError}
    assert len({STATUS[kind] for kind in others}) == len(others)
    assert status_of(errors.ConfigError("x")) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.WaitTimeoutError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.InfraError),
        (grpc.StatusCode.UNKNOWN, errors.InfraError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.CapacityError),
    ],
)
def test_a_status_without_a_detail_becomes_an_error_that_names_the_service(
    code: grpc.StatusCode, kind: type[errors.MeshError]
) -> None:
    received = arrived(code, "words of gRPC")
    assert type(received) is kind
    assert "queue at host:1" in received.message


def test_a_message_that_is_too_large_names_both_sizes() -> None:
    reason = "SERVER: Received message larger than max (5000000 vs. 4194304)"
    received = arrived(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
    assert received.details == {"size": "5000000", "limit": "4194304"}
    assert "5000000" in received.message


def test_with_an_unreadable_detail_the_status_decides() -> None:
    received = arrived(grpc.StatusCode.UNAVAILABLE, "gone", detail=b"\xff\xff\xff")
    assert type(received) is errors.UnavailableError


def test_an_error_of_any_size_fits_into_metadata() -> None:
    error = errors.InfraError("é" * 100_000, **{f"k{n}": "é" * 100_000 for n in range(100)})
    assert len(to_detail(error)) < 48_000


def test_an_unknown_code_becomes_an_infra_error() -> None:
    assert type(errors.from_detail("from_the_future", "x", {})) is errors.InfraError


def test_an_engine_that_is_gone_elsewhere_is_a_service_that_is_unavailable() -> None:
    sent = errors.EngineGoneError("the engine has stopped")
    received = arrived(status_of(sent), detail=to_detail(sent))
    assert type(received) is errors.UnavailableError
    assert received.message == "the engine has stopped"
