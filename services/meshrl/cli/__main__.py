"""`python -m meshrl.cli`: how `up` starts every service."""

from meshrl.cli.root import main

main()
