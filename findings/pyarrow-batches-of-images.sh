#!/usr/bin/env bash
# Images in parquet, as data sets are published: `ParquetFile.iter_batches(16)` suggests that 16 rows are in memory. Of a
# row group of 300 MB the first batch alone takes more than 300 MB, for the column chunk is read whole; `buffer_size` with
# `pre_buffer=False` reads in pieces, and still takes 100 MB or more, because a page holds 1,024 images: the writer looks at
# `data_page_size` (1 MiB by default) once in 1,024 rows. Only files written with a small `write_batch_size` and read with
# a buffer take some 20 MB. A loader process for each core multiplies this.
#
# pyarrow 26.0.1, seen on 2026-11-28.
# Source: tried; page: pyarrow.parquet.ParquetFile, write_table (`write_batch_size`, `data_page_size`).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install pyarrow==26.0.1 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""Memory that the first batch of 16 images takes, by how the file was written and is read."""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES, IMAGE_BYTES = 3000, 100_000
WRITING = {"default pages": {}, "write_batch_size=16": {"write_batch_size": 16}}
READING = {"default": {}, "buffer_size=1 MiB": {"pre_buffer": False, "buffer_size": 1 << 20}}


def write(path: str, options: dict) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    images = pa.array([random.bytes(IMAGE_BYTES) for _ in range(IMAGES)], pa.binary())
    pq.write_table(pa.table({"image": images}), path, compression="none", row_group_size=IMAGES, **options)


def read(path: str, options: dict) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, **options) as file:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        next(file.iter_batches(16, columns=["image"], use_threads=False))
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)


def in_a_process(function: str, path: Path, options: dict) -> str:
    words = [sys.executable, __file__, function, str(path), json.dumps(options)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def main() -> None:
    taken = {}
    with tempfile.TemporaryDirectory() as folder:
        for written, writing in WRITING.items():
            path = Path(folder, "images.parquet")
            in_a_process("write", path, writing)
            for name, reading in READING.items():
                taken[written, name] = int(in_a_process("read", path, reading))
                print(f"{written}, reader {name}: {taken[written, name]} MiB for 16 images of 0.1 MB")
    default, buffered = READING
    pages, small_pages = WRITING
    large = taken[pages, default] > 250 and taken[small_pages, default] > 250 and taken[pages, buffered] > 90
    if not (large and taken[small_pages, buffered] < 60):
        sys.exit("changed: all but small pages read with a buffer took 90 MiB and more")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"write": write, "read": read}[sys.argv[1]](sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
EOF
"$folder/venv/bin/python" -W ignore "$folder/finding.py"
