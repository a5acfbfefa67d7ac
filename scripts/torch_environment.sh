#!/usr/bin/env bash
# Makes .torch/<build>: an environment with one vendor's build of torch (cuda, ascend), with Triton (triton), Ray (ray) or TRL (trl), that sees the
# packages of the development environment behind its own. PYTHON is the development environment's.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
version=$(sed -n 's/^torch==//p' constraints.txt)
environment=.torch/$build

rm -rf "$environment"
"$PYTHON" -m venv --without-pip "$environment"
# Vendors' builds without dependencies: the vendors' libraries are simulated, and the rest is in the development environment.
dependencies=--no-deps
case $build in
  # `===`: the plain release, and no local one such as +cpu. Triton is the release that this torch is built with; the worker's attention needs it.
  cuda) packages=("torch===$version" triton==3.7.1) ;;
  ascend) packages=("torch-npu==$version") ;;
  triton) packages=(triton==3.7.1) ;;
  ray) packages=("ray[serve]==$(sed -n 's/^ray==//p' constraints.txt)") dependencies= ;;
  # Without dependencies, too, or torch and transformers would be installed again: what the development environment has not is named here.
  trl) packages=("$(sed -n '/^trl==/p' constraints.txt)" "$(sed -n '/^accelerate==/p' constraints.txt)" "$(sed -n '/^datasets==/p' constraints.txt)"
    dill multiprocess pandas psutil pyarrow python-dateutil xxhash) ;;
  *) echo "there is no build '$build'; cuda, ascend, triton, ray and trl are known" >&2; exit 2 ;;
esac
"$PYTHON" -m pip --python "$environment/bin/python" --disable-pip-version-check install -q $dependencies "${packages[@]}"

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Added as a site, so that the editable installs in it count too.
echo "import site; site.addsitedir('$(packages "$PYTHON")')" > "$(packages "$environment/bin/python")/development.pth"
