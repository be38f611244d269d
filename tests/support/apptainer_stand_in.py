"""A container that holds nothing of its own, and a program that takes the options of `apptainer exec` of dlbench.

The program refuses all other options, and enters the image: for machines that have no Apptainer. What runs in it sees
the image's root and what is mounted there, no more. Needs root, unshare(1), mount(8) and unsquashfs(1).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = r"""#!/bin/bash
set -e
[ "$1" = exec ] || { echo "stand-in: $1" >&2; exit 255; }
shift
mounts=(); place=/
while [ $# -gt 0 ]; do
  case $1 in
    --no-home|--writable-tmpfs|--nv|--rocm) shift ;;
    --bind) mounts+=("$2"); shift 2 ;;
    --pwd) place=$2; shift 2 ;;
    -*) echo "Error for command \"exec\": unknown flag: $1" >&2; exit 255 ;;
    *) break ;;
  esac
done
image=$1; shift
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
unset LD_LIBRARY_PATH
for name in $(compgen -e APPTAINER_); do unset "$name"; done
root=$(mktemp -d /tmp/dlbench-stand-in-XXXXXX)
export root image place
exec unshare --mount -- bash -c '
  set -e
  mount -t tmpfs none "$root"
  unsquashfs -quiet -no-progress -force -dest "$root" "$image" >/dev/null
  number=$1; shift
  for path in /dev /proc /sys /tmp; do
    mkdir -p "$root$path"; mount --rbind "$path" "$root$path"
  done
  # As Apptainer does by itself.
  for path in /etc/hosts /etc/resolv.conf; do
    [ ! -e "$path" ] || { mkdir -p "$root/etc"; : >"$root$path"; mount --bind "$path" "$root$path"; }
  done
  while [ "$number" -gt 0 ]; do
    IFS=: read -r from to how <<<"$1"
    if [ -d "$from" ]; then mkdir -p "$root$to"
    else mkdir -p "$root${to%/*}"; [ -e "$root$to" ] || : >"$root$to"; fi
    mount --rbind "$from" "$root$to"
    [ "$how" != ro ] || mount -o remount,bind,ro "$root$to"
    shift; number=$((number - 1))
  done
  root_was=$root; unset root image
  where=$place; unset place
  exec chroot "$root_was" /usr/bin/env --chdir="$where" "$@"
' bash "${#mounts[@]}" "${mounts[@]}" "$@"
"""


def made(root: Path) -> Path:
    """The folder `root`, with a file that no machine has beside those places: /etc/only-in-the-image."""
    for name in ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "run", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc" / "only-in-the-image").touch()
    return root


def packed(root: Path) -> Path:
    """The same as one file."""
    image = root.with_suffix(".sqsh")
    subprocess.run(
        ["mksquashfs", root, image, "-quiet", "-no-progress"], check=True, timeout=60, stdout=subprocess.DEVNULL
    )
    return image


def mounts() -> list[str]:
    """What this Python needs of the machine, as `container.mounts` has it; each once."""
    places = dict.fromkeys(
        str(Path(place).resolve())
        for place in ("/usr", "/etc/ssl", sys.prefix, sys.base_prefix)
        if Path(place).exists()
    )
    inner = [one for one in places if any(one != other and Path(one).is_relative_to(other) for other in places)]
    return [f"{one}:{one}:ro" for one in places if one not in inner]


def install(folder: Path) -> None:
    program = folder / "apptainer"
    program.write_text(PROGRAM)
    program.chmod(0o755)


def lacking() -> str:
    """Why it cannot run here; empty where it can."""
    import os

    if os.geteuid() != 0:
        return "entering a root file system needs root"
    missing = [name for name in ("unshare", "mount", "mksquashfs", "unsquashfs") if shutil.which(name) is None]
    return f"not on PATH: {', '.join(missing)}" if missing else ""
