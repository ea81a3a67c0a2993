"""Event files for TensorBoard in `<run.dir>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshrl.trainer.loggers._types import COLUMNS, LoggedRows, LoggedRun


class TensorBoardLogger:
    """A trainer that starts again hides what the files have of the steps that it repeats."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter, summary

        hparams: Any = summary.hparams

        self._writer: Any = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=run.step + 1 if run.step else None
        )
        if run.settings:
            plain = {
                k: v for k, v in run.settings.items() if isinstance(v, bool | int | float | str)
            }
            events: Any = self._writer.file_writer
            for each in hparams(plain, {}):
                events.add_summary(each)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def rows(self, step: int, rows: LoggedRows) -> None:
        """Log samples as a text, and a histogram of each column."""
        for name, values in rows.histograms.items():
            self._writer.add_histogram(f"histogram/{rows.split}/{name}", values, step)
        told = [
            "\n".join(
                f"    {name}: {_indented(value)}" for name, value in zip(COLUMNS, row, strict=True)
            )
            for row in rows.samples
        ]
        self._writer.add_text(f"samples/{rows.split}", "\n\n---\n\n".join(told), step)
        self._writer.flush()

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


def _indented(value: object) -> str:
    """Markdown shows lines with four spaces as they are: what a model said becomes no markup."""
    return str(value).replace("\n", "\n      ")


open_logger = TensorBoardLogger
