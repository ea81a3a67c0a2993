"""The command line of a campaign. Exit code 0: nothing lost, nothing duplicated, ledger exact, history legal."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from .bugs import BUGS
from .driver import Campaign, CampaignError
from .plan import Plan

NOT_PERMITTED = 77
"""The exit code by which test harnesses know a skip."""


def main() -> int:
    """Run one campaign; its last line is JSON."""
    parser = _parser()
    options = parser.parse_args()
    if options.lost_answers and options.cuts:
        parser.error("--lost-answers takes no --cuts")
    with tempfile.TemporaryDirectory(prefix="meshrl-chaos-") as scratch:
        folder = options.folder or Path(scratch) / "campaign"
        plan = Plan(
            folder=folder,
            seed=options.seed,
            kills=options.kills,
            pauses=options.pauses,
            cuts=options.cuts,
            cut_s=options.cut_s,
            fills=options.fills,
            pace_s=options.pace,
            lost_answers=options.lost_answers,
            bug=options.bug,
            queue={"store": options.store, **_settings(options.set)},
        )
        print(f"campaign: seed {plan.seed}, files in {folder}", file=sys.stderr, flush=True)
        try:
            report = Campaign(plan).run()
        except PermissionError as error:
            print(json.dumps({"seed": plan.seed, "ok": False, "skipped": str(error)}))
            return NOT_PERMITTED
        except CampaignError as error:
            print(json.dumps({"seed": plan.seed, "ok": False, "error": str(error)}))
            return 1
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0, help="kill -9 of a random process")
    parser.add_argument("--pauses", type=int, default=0, help="SIGSTOP for longer than a lease")
    parser.add_argument("--cuts", type=int, default=0, help="silent network cuts (takes root)")
    parser.add_argument("--cut-s", type=float, default=3.0, help="seconds of a cut")
    parser.add_argument("--fills", type=int, default=0, help="full disks (takes root)")
    parser.add_argument(
        "--lost-answers", type=float, default=0.0, metavar="SHARE", help="of the queue's answers"
    )
    parser.add_argument("--pace", type=float, default=0.35, help="mean seconds between strikes")
    parser.add_argument("--store", default="disk", help="the queue's store")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="queue.KEY")
    parser.add_argument("--bug", choices=list(BUGS), default="", help="a queue wrong on purpose")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    return parser


def _settings(pairs: list[str]) -> dict[str, object]:
    return {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in pairs)}


if __name__ == "__main__":
    sys.exit(main())
