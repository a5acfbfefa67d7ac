#!/usr/bin/env bash
# Builds dist/: an sdist and a wheel of every distribution, checked as an index would check them. PYTHON is the development environment's.
#
# Native code is compiled where the development install was, so that it is not compiled again: what is added here is the CPU backend's kernels for
# instruction sets that this machine does not have. Wheels get the manylinux tag of this machine's C
# library, which is the oldest system that they can be claimed for; build them on an older one to claim more.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
PATH="$(dirname "$python"):$PATH"
export SKBUILD_CMAKE_DEFINE=HARDPOINT_NATIVE=OFF
mkdir -p build
rm -rf dist build/dist
for project in {core,backends/*,conformance_tests,simulators}/pyproject.toml; do
  folder=$(dirname "$project")
  "$python" -m build --sdist --no-isolation --outdir dist "$folder" > build/dist.log 2>&1 || { cat build/dist.log >&2; exit 1; }
  flock build/development.lock "$python" -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation -w build/dist "./$folder"
done
mv build/dist/*-any.whl dist
# The simulators' libraries stand in for vendors' and link one another by their names; they are for tests, on the machine that built them.
mv build/dist/hardpoint_simulators-*.whl dist
for wheel in build/dist/*.whl; do
  auditwheel repair --wheel-dir dist "$wheel" > build/dist.log 2>&1 || { cat build/dist.log >&2; exit 1; }
done
twine check --strict dist/*
