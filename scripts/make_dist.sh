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

# Run a command, whose output is shown if it fails.
quietly() { "$@" > build/dist.log 2>&1 || { cat build/dist.log >&2; exit 1; }; }

projects=()
for project in {core,backends/*,conformance_tests,simulators}/pyproject.toml; do
  projects+=("./$(dirname "$project")")
done
for project in "${projects[@]}"; do
  quietly "$python" -m build --sdist --no-isolation --skip-dependency-check --outdir dist "$project"
done
quietly "$python" -m pip --disable-pip-version-check wheel --no-deps --no-build-isolation -w build/dist "${projects[@]}"
mv build/dist/*-any.whl dist
# The simulators' libraries stand in for vendors' and link one another by their names; they are for tests, on the machine that built them.
mv build/dist/hardpoint_simulators-*.whl dist
quietly auditwheel repair --wheel-dir dist build/dist/*.whl
twine check --strict dist/*
