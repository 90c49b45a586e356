import io

import pytest
from rich.console import Console
from rich.table import Table

from sharder.train.planning import print_whole_numbers


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_console_cuts_no_number(width):
    console = Console(width=width, file=io.StringIO())
    table = Table("parameter", "storage", "update", "bytes/device")
    table.add_row("blocks/a_rather_long_name_of_a_parameter", "embed/fsdp mlp/tensor", "whole", "6,231,564,800")
    table.add_row("bytes/device", "3,115,782,400", "3,115,782,401", "3,115,782,402")
    print_whole_numbers(console, table)
    text = console.file.getvalue()
    assert (
        all(number in text for number in ("6,231,564,800", "3,115,782,400", "3,115,782,401", "3,115,782,402"))
        and "\u2026" not in text
    )
