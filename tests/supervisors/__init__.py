"""The mesh under other people's supervisors, for real: Docker's compose, podman's pods, systemd. By hand, as root.

    python -m tests.supervisors.images FOLDER       a base by debootstrap, and the images on it
    python -m tests.supervisors.compose FOLDER      needs the images, as the next two do, and prints what it saw
    python -m tests.supervisors.podman FOLDER
    python -m tests.supervisors.systemd FOLDER

They need Debian's `docker.io` with compose 2, `podman` and `debootstrap`, run daemons of their own in FOLDER and
leave nothing beside it.
"""
