#!/bin/bash
# Installs @WHAT@ from this folder, without a network: ./install.sh NEW-FOLDER [PYTHON]
# The wheels are for Python @PYTHON@ on @MACHINE@. The folder may be moved or copied.
set -e -o pipefail

target=${1:?usage: ./install.sh NEW-FOLDER [PYTHON]}
python=${2:-python@PYTHON@}
horovod=@HOROVOD@
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

if [ -e "$target" ]; then
  echo "install.sh: error: $target exists already; choose another folder" >&2
  exit 2
fi
if ! found=$("$python" -I -c 'import platform, sys; print("%d.%d" % sys.version_info[:2], platform.machine())'); then
  echo "install.sh: error: $python cannot be started; name a Python @PYTHON@: ./install.sh $target PYTHON" >&2
  exit 5
fi
if [ "$found" != "@PYTHON@ @MACHINE@" ]; then
  echo "install.sh: error: $python is Python $found, and the wheels are for @PYTHON@ @MACHINE@" >&2
  exit 5
fi
if ! wrong=$(cd -- "$here" && sha256sum --check --quiet --strict MANIFEST.sha256 2>&1); then
  echo "install.sh: error: the folder is damaged: ${wrong%%$'\n'*}" >&2
  exit 4
fi

# Half an installation is none.
trap 'echo "install.sh: error: $target is not complete, and is removed" >&2; rm -rf -- "$target"' EXIT
trap 'exit 130' HUP INT TERM
"$python" -I -m venv "$target"
pip=("$target/bin/python" -I -m pip --isolated --disable-pip-version-check --quiet install --no-index --find-links "$here/wheels")
own=("$here"/wheels/dlbench-*.whl)
extras='@WHAT@'
"${pip[@]}" "${own[0]}${extras#dlbench}"
if [ "$horovod" = 1 ]; then
  "${pip[@]}" cffi cloudpickle packaging psutil pyyaml
  "${pip[@]}" --no-deps "$here"/horovod/*.whl
fi
trap - EXIT HUP INT TERM
echo "installed: $target/bin/dlbench"
[ ! -d "$here/data" ] || echo "data: $here/data"
