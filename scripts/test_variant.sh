#!/usr/bin/env bash
# Builds the native packages in a special way, in an environment of their own, and runs tests against them.
#
#   scripts/test_variant.sh sanitize      AddressSanitizer and UndefinedBehaviourSanitizer, in the portable build (the baseline instruction set alone)
#   scripts/test_variant.sh sanitize-all  the same with every instruction set: minutes more to build
#   scripts/test_variant.sh tsan          ThreadSanitizer: the memory engine and its driver for the CPU, in tests with threads
#
# PYTHON names the interpreter of the development environment, whose third-party packages are used (not its editable installs). What a variant does
# not change is installed as `make dist` built it.
set -euo pipefail
cd "$(dirname "$0")/.."
variant=$1
python=${PYTHON:-.venv/bin/python}
environment=build/variants/$variant
site_packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
tools=$(cd "$(dirname "$python")" && pwd)

test -x "$environment/bin/python" || "$python" -m venv --without-pip "$environment"
own=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$site_packages" > "$own/development.pth"

pip_install() {
  PATH="$tools:$PATH" "$python" -m pip --python "$environment/bin/python" --disable-pip-version-check install -q --no-deps --no-build-isolation --force-reinstall "$@"
}

# For errors' traces nothing is stripped of the names of its functions.
install() { pip_install -C "build-dir=$PWD/$environment/{name}" -C install.strip=false "$@"; }

case $variant in
  sanitize | sanitize-all)
    portable=$([ "$variant" = sanitize ] && echo ON || echo OFF)
    # Tests of memory share their models and interposed drivers with the conformance suite.
    pip_install dist/hardpoint{,_conformance,_simulators}-*.whl
    # From the sdist, which is shown by this to build where the core is installed: the plain one, since it is imported for its headers.
    install dist/hardpoint_cpu-*.tar.gz -C cmake.define.HARDPOINT_SANITIZE=address,undefined -C cmake.define.HARDPOINT_PORTABLE="$portable"
    install ./core ./backends/{cuda,rocm,ascend} -C cmake.define.HARDPOINT_SANITIZE=address,undefined
    # The interpreter is not instrumented, so the runtime is loaded before it; its own leaks are not ours.
    preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
    if [ "$portable" = ON ]; then
      LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 "$environment/bin/python" -c \
        'from hardpoint_cpu import _native; assert _native.available_isas() == ["baseline"], _native.available_isas()'
    fi
    # What the sanitizer holds back of freed memory would count as growth (processes_own_memory, grow_nothing, there_for_another_process), and it
    # answers a crash itself (crashes_is_broken): these run below. pybind11 rethrows the end of a thread by a reference that the sanitizer objects
    # to (daemon). Its runtime maps memory at any time, also where a range of addresses was given up for a moment (hold_until); and it does not
    # survive a fork at a time when another thread allocates (forked_child, a_fork_in). Nothing that is instrumented runs in tests of the host's
    # memory and of how drivers are built, which build what they run, nor of probes, which ask in a plain interpreter; of ROCm's, some open the driver.
    sanitized() {
      LD_PRELOAD="$preload" ASAN_OPTIONS="detect_leaks=0$1" UBSAN_OPTIONS=print_stacktrace=1 "$environment/bin/python" -m pytest -q -p no:cacheprovider --timeout 600 "${@:2}"
    }
    sanitized "" core/tests/scheduler core/tests/executor/test_messages.py core/tests/memory --ignore core/tests/memory/test_host_memory.py \
      --ignore core/tests/memory/test_driver_build.py backends/cpu/tests backends/{cuda,rocm,ascend}/tests/test_{allocator,driver}.py \
      backends/rocm/tests/test_probe.py::TestRuntime tests/memory \
      -k "not processes_own_memory and not grow_nothing and not there_for_another_process and not crashes_is_broken and not daemon and not hold_until and not forked_child and not a_fork_in"
    # Of those, all that depend on no moment: little is held back, a crash is left to the system, and no other thread is at work at a fork.
    sanitized :quarantine_size_mb=1:handle_segv=0 core/tests/memory/test_driver_probe.py core/tests/memory/test_disk_store.py \
      backends/cpu/tests/test_driver.py backends/cpu/tests/test_thread_pool.py tests/memory/test_processes.py \
      -k "(processes_own_memory or grow_nothing or there_for_another_process or crashes_is_broken or forked_child or waits_at_a_pool) and not hold_until and not child_is_refused"
    ;;
  tsan)
    pip_install dist/hardpoint_{conformance,simulators}-*.whl
    install ./core -C cmake.define.HARDPOINT_SANITIZE=thread -C cmake.define.HARDPOINT_MEMORY_ONLY=ON
    install ./backends/cpu -C cmake.define.HARDPOINT_SANITIZE=thread -C cmake.define.HARDPOINT_PORTABLE=ON -C build.targets=_driver -C install.components=driver
    # Interpreter and torch are not instrumented: what matters are the threads of the engine itself, in tests that import no torch. The runtime
    # does not bear addresses at random everywhere. Its shadow, four times what tests fill, is mapped by large pages: by small ones most of the
    # time were page faults.
    preload="$(g++ -print-file-name=libtsan.so) $(g++ -print-file-name=libstdc++.so)"
    rm -f "$environment"/race.*
    LD_PRELOAD="$preload" TSAN_OPTIONS="exitcode=66 no_huge_pages_for_shadow=0 log_path=$PWD/$environment/race" setarch --addr-no-randomize \
      "$environment/bin/python" -m pytest -q -p no:cacheprovider --timeout 600 --confcutdir tests/memory \
      tests/memory/test_threads.py tests/memory/test_policies.py tests/memory/test_host_tier.py tests/memory/test_disk_tier.py \
      tests/memory/test_source_tier.py tests/memory/test_against_model.py tests/memory/test_bad_input.py \
      tests/memory/test_transactions.py -k "not simulated" ||
      { cat "$environment"/race.* >&2; exit 1; }
    ;;
  *)
    echo "unknown variant '$variant': sanitize, sanitize-all or tsan" >&2
    exit 2
    ;;
esac
