#!/usr/bin/env bash
# Makes .torch/<build>: an environment with one vendor's build of torch (cuda, ascend), with Triton (triton), Ray (ray), TRL and PEFT (trl), verl (verl) or clients of servers (clients), that sees the
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
  # `===`: the plain release, and no local one such as +cpu. Triton, of the release that this torch is built with, the worker's attention needs:
  # it is that of .torch/triton, whose 700 MB are not unpacked again.
  cuda) packages=("torch===$version") ;;
  ascend) packages=("torch-npu==$version") ;;
  triton) packages=(triton==3.7.1) ;;
  ray) packages=("ray[serve]==$(sed -n 's/^ray==//p' constraints.txt)") dependencies= ;;
  # Without dependencies, too, or torch and transformers would be installed again: what the development environment has not is named here.
  trl) packages=("$(sed -n '/^trl==/p' constraints.txt)" "$(sed -n '/^accelerate==/p' constraints.txt)" "$(sed -n '/^datasets==/p' constraints.txt)"
    "$(sed -n '/^peft==/p' constraints.txt)" dill multiprocess pandas psutil pyarrow python-dateutil xxhash) ;;
  verl) packages=($(grep -E '^(verl|tensordict|ray|accelerate|datasets|peft)==' constraints.txt) antlr4-python3-runtime==4.9.3 cachetools cloudpickle codetiming dill hydra-core
    importlib_metadata msgpack multiprocess nvtx omegaconf orjson pandas protobuf psutil pyarrow python-dateutil pyvers torchdata xxhash zipp) ;;
  # With dependencies, but for guidellm and accelerate, whose torch the development environment has; what else they need is named.
  clients) packages=($(grep -E '^(dspy|langchain-core|langchain-openai|litellm|llama-index-core|outlines)==' constraints.txt)
    "lm-eval[api]==$(sed -n 's/^lm-eval==//p' constraints.txt)" aiologic culsans eval_type_backport faker ftfy loguru msgpack protobuf psutil sanic) dependencies= ;;
  *) echo "there is no build '$build'; cuda, ascend, triton, ray, trl, verl and clients are known" >&2; exit 2 ;;
esac
"$PYTHON" -m pip --python "$environment/bin/python" --disable-pip-version-check install -q $dependencies "${packages[@]}"
if [ "$build" = clients ]; then
  "$PYTHON" -m pip --python "$environment/bin/python" --disable-pip-version-check install -q --no-deps $(grep -E '^(accelerate|guidellm)==' constraints.txt)
fi

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Added as a site, so that the editable installs in it count too.
echo "import site; site.addsitedir('$(packages "$PYTHON")')" > "$(packages "$environment/bin/python")/development.pth"
if [ "$build" = cuda ]; then packages "$PWD/.torch/triton/bin/python" > "$(packages "$environment/bin/python")/triton.pth"; fi
# verl's wheel has its tests as a package of that name, which would hide ours.
if [ "$build" = verl ]; then rm -rf "$(packages "$environment/bin/python")/tests"; fi
