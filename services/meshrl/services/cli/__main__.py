"""`python -m meshrl.services.cli`: how `up` starts every service."""

from meshrl.services.cli.root import main

main()
