"""A recipe whose examples' ids are written down by the process that reads them: SHARDER_TEST_RECORD/<process>.jsonl, a line per read."""

import json
import os
from pathlib import Path

from small import small_dropout

from sharder.data.synthetic import SyntheticTokens

read = SyntheticTokens.read


def recorded_read(self, ids):
    name = os.environ.get("JAX_PROCESS_ID", "0") + ".jsonl"
    with open(Path(os.environ["SHARDER_TEST_RECORD"]) / name, "a") as file:
        file.write(json.dumps([int(i) for i in ids]) + "\n")
    return read(self, ids)


def recording():
    SyntheticTokens.read = recorded_read
    return small_dropout()
