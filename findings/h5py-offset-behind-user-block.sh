#!/usr/bin/env bash
# `DatasetID.get_offset()` of h5py is documented as the offset of the values in the file, or None where there is none.
# In a file with a user block a dataset that was never written has the offset 511 for a block of 512 bytes (1,023 for
# 1,024): HDF5's "undefined" is -1, to which the length of the block is added. Who reads values by offset (mmap, direct
# I/O, GPUDirect) takes the end of the user block and the file's header for data. Ask `get_storage_size()` first.
#
# h5py 3.16.0 (HDF5 2.0.0), seen on 2026-11-28.
# Source: tried; page: h5py low-level API, h5d.DatasetID.get_offset.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check install h5py==3.16.0 numpy==2.4.6
cat >"$folder/finding.py" <<'EOF'
"""Offsets of a dataset that was never written and of one that was, without and with a user block."""

import os
import sys
import tempfile

import h5py
import numpy as np


def main() -> None:
    offsets = {}
    values = np.arange(8)
    with tempfile.TemporaryDirectory() as folder:
        for block in (0, 512, 1024):
            path = os.path.join(folder, f"{block}.h5")
            with h5py.File(path, "w", userblock_size=block) as file:
                file.create_dataset("never written", (8,), "int64")
                file["written"] = values
            with h5py.File(path) as file:
                unwritten = file["never written"].id
                offsets[block] = unwritten.get_offset()
                print(f"user block of {block} bytes: never written, offset {offsets[block]}, "
                      f"storage {unwritten.get_storage_size()} bytes, values {file['never written'][:].tolist()}")
                raw = np.fromfile(path, "int64", 8, offset=file["written"].id.get_offset())
                assert (raw == values).all()
    if offsets != {0: None, 512: 511, 1024: 1023}:
        sys.exit("changed: offsets were None, 511 and 1023")


if __name__ == "__main__":
    main()
EOF
"$folder/venv/bin/python" -W ignore "$folder/finding.py"
