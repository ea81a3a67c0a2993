"""Certificates of an authority made for a test, as files."""

from __future__ import annotations

from pathlib import Path

import trustme

from meshrl.common.sockets import Certificates


def issue(
    folder: Path, authority: trustme.CA, name: str | None = None, *, key: bool = True
) -> Certificates:
    """Write a certificate for this machine into `folder`, over one that is there.

    `name` is its common name; without `key`, the key stays the former one's.
    """
    folder.mkdir(exist_ok=True)
    issued = authority.issue_cert("127.0.0.1", "localhost", common_name=name)
    if key:
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(issued.private_key_pem.bytes())
    (folder / "cert").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (folder / "ca").write_bytes(authority.cert_pem.bytes())
    return Certificates(cert=folder / "cert", key=folder / "key", ca=folder / "ca")
