"""`sharder report RUN...`: its options."""

from pathlib import Path

import tyro

from sharder.options import parse


def run(arguments: list[str]) -> int:
    """Say where the time of runs went, over all of their attempts, and draw what they recorded as one HTML file."""

    def command(runs: tyro.conf.Positional[tuple[Path, ...]], out: Path | None = None) -> tuple:
        """
        Args:
            runs: Folders of runs; several are overlaid.
            out: The file; unset: report.html in the folder of the only run.
        """
        return runs, out

    runs, out = parse(command, args=arguments, prog="sharder report", description=run.__doc__)
    from sharder.config import UserError
    from sharder.launch.ledger import describe, read_ledger
    from sharder.report.page import write_report

    if not runs:
        raise UserError("RUN is missing. Usage: sharder report RUN... [--out FILE]")
    written = write_report(list(runs), out)
    for folder in runs:
        if (folder / "events.jsonl").exists():  # else the page names the gap
            print(f"{folder}: {describe(read_ledger(folder))}")
    print(f"written to {written}")
    return 0
