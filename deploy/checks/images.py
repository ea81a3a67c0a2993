"""Builds the images of deploy/Dockerfile on this machine, on a base that debootstrap makes: no registry is asked."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import click

from .pods import ROOT

BASE: Final = "base:bookworm"
MIRROR: Final = "http://deb.debian.org/debian"
PACKAGES: Final = "ca-certificates,python3,python3-pip,python3-venv"
CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
PIP: Final = "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n"


class Docker:
    """A dockerd of our own, in a folder, and its command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "docker"
        self.folder.mkdir(parents=True, exist_ok=True)
        socket = f"unix://{self.folder}/socket"
        self.environment = {**os.environ, "DOCKER_HOST": socket, "DOCKER_BUILDKIT": "1"}
        self.daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["dockerd", "--data-root", f"{self.folder}/root", "--exec-root"]
        words += [f"{self.folder}/exec", "--pidfile", f"{self.folder}/pid"]
        with (self.folder / "log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [*words, "--host", self.environment["DOCKER_HOST"]],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while self.run("info", check=False).returncode:
            if self.daemon.poll() is not None:
                raise SystemExit(f"dockerd ended: {self.folder}/log")
            time.sleep(0.3)

    def stop(self) -> float:
        """As a machine's shutdown stops it; the seconds that it took."""
        began = time.monotonic()
        pid = int((self.folder / "pid").read_text())
        os.kill(pid, signal.SIGTERM)
        while self.run("info", check=False).returncode == 0 or (self.folder / "pid").exists():
            time.sleep(0.3)
        if self.daemon is not None:
            self.daemon.wait()
        return time.monotonic() - began

    def run(
        self, *words: str, check: bool = True, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """`docker` and these words."""
        done = subprocess.run(
            ["/usr/bin/docker", *words],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=timeout,
        )
        if check and done.returncode:
            raise SystemExit(f"docker {' '.join(words)}: {done.stderr[-3000:]}")
        return done

    def lines(self, *words: str) -> list[str]:
        return self.run(*words).stdout.splitlines()


@contextlib.contextmanager
def docker(folder: Path) -> Iterator[Docker]:
    """The engine of this folder; started and stopped here unless it runs already."""
    engine = Docker(folder)
    if engine.run("info", check=False).returncode == 0:
        yield engine
        return
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def make_base(engine: Docker, folder: Path, more: str = "", image: str = BASE) -> None:
    """Debian with its own Python, pip and this machine's certificates, as an image."""
    if engine.lines("images", "-q", image):
        return
    root = folder / "root"
    packages = ",".join(filter(None, (PACKAGES, more)))
    words = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm"]
    subprocess.run([*words, str(root), MIRROR], check=True, stdout=subprocess.DEVNULL)
    (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()  # as in the images of Python
    (root / "usr/bin/python").symlink_to("python3")
    (root / "etc/pip.conf").write_text(PIP)
    shutil.copyfile(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    for archive in (root / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
    tar = subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE)
    words = ["/usr/bin/docker", "import", "-", image]
    subprocess.run(words, stdin=tar.stdout, check=True, env=engine.environment)
    shutil.rmtree(root)


@contextlib.contextmanager
def index_of(wheels: Path, folder: Path) -> Iterator[str]:
    """The URL of a package index on loopback, with torch from `wheels` and what it asks for."""
    found = folder / "index"
    if not found.exists():
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(found)]
        (torch,) = wheels.glob("torch-*.whl")
        subprocess.run([*words, str(torch)], check=True)
        for wheel in list(found.glob("*.whl")):
            name = wheel.name.partition("-")[0].lower().replace("_", "-")
            (found / name).mkdir(exist_ok=True)
            wheel.rename(found / name / wheel.name)
    handler = partial(SimpleHTTPRequestHandler, directory=str(found))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--wheels", type=click.Path(path_type=Path), help="A folder with a wheel of torch.")
@click.option("--image", "images", multiple=True, default=["core", "cpu"], show_default=True)
def main(folder: Path, wheels: Path | None, images: tuple[str, ...]) -> None:
    """Build IMAGES in FOLDER and print their sizes."""
    folder = folder.absolute()
    with docker(folder) as engine, contextlib.ExitStack() as stack:
        make_base(engine, folder)
        torch = stack.enter_context(index_of(wheels.absolute(), folder)) if wheels else ""
        for image in images:
            began = time.monotonic()
            words = ["build", "--network=host", "-f", str(ROOT / "deploy/Dockerfile")]
            words += [f"--build-arg=BASE={BASE}", f"--build-arg=IMAGE={image}"]
            words += [f"--build-arg=TORCH_INDEX={torch}", f"--tag=meshrl:{image}", str(ROOT)]
            engine.run(*words, timeout=3600)
            size = int(engine.lines("image", "inspect", "-f", "{{.Size}}", f"meshrl:{image}")[0])
            print(
                f"meshrl:{image}: {size / 1e6:,.0f} MB, built in {time.monotonic() - began:.0f} s"
            )
        size = int(engine.lines("image", "inspect", "-f", "{{.Size}}", BASE)[0])
        print(f"{BASE}: {size / 1e6:,.0f} MB")
        if "cpu" in images:
            engine.run("tag", "meshrl:cpu", "meshrl")


if __name__ == "__main__":
    main()
